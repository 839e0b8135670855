"""Checks before anything starts: a run that cannot work ends here, with one line that says what to do."""

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.api_keys import ApiKeyError, find_key, how_to_set, written_secret
from configs.envs import EnvsConfig
from configs.errors import did_you_mean
from configs.learner import CustomLossConfig
from configs.reward import JudgeLabelConfig
from configs.rollout import PlannerAgentConfig, PromptConfig
from configs.run import RunConfig
from configs.wording import reason
from ray_jobs.checks.machine import check_machine
from ray_jobs.metrics.trackers import check_trackers
from ray_jobs.run.model_folder import PreflightError, check_model, check_prm, resolve_model


def key_variables(config: RunConfig) -> tuple[str, ...]:
    """The environment variables with keys that this recipe names, by itself or by the tools that it switches on."""
    from envs.tools import finders as pages

    named = _values_of(config.model_dump(), "api_key_env")
    envs = config.envs
    finders = {envs.web.finder} if "web_search" in envs.actions else set()
    if ("search" in envs.actions and envs.search == "tavily") or "tavily" in finders:
        named.append(pages.TAVILY_KEY_VARIABLE)
    if "google_search" in envs.actions or "google" in finders:
        named += [pages.GOOGLE_KEY_VARIABLE, pages.ENGINE_VARIABLE]
    return tuple(dict.fromkeys(named))


def check_judge_key(config: RunConfig) -> None:
    """Whether this machine has the key of the judge that labels. Raises ApiKeyError."""
    if isinstance(config.label, JudgeLabelConfig):
        check_key("label.judge.api_key_env", config.label.judge.api_key_env)


def check_key(setting: str, variable: str | None) -> None:
    """Whether there is a key where `setting` says. Raises ApiKeyError."""
    try:
        if variable is None or find_key(variable):
            return
    except ApiKeyError as error:
        raise ApiKeyError(f"{setting}: {error}") from None
    raise ApiKeyError(
        f"{setting} names {variable}, which is not set; {how_to_set(variable)}, or leave it out for a server that "
        "needs no key"
    )


def check_nothing_secret_is_written(config: RunConfig) -> None:
    """Run folder, report and process list show settings and command. Raises ApiKeyError where they hold the value of a
    variable that has the name of a secret."""
    if name := written_secret(f"{config.model_dump_json()}\n{shlex.join(sys.argv)}"):
        raise ApiKeyError(
            f"the settings or the command hold the value of {name}, and the run folder would show it; take it out, and "
            f"name {name} with the setting's api_key_env"
        )


def _values_of(table: Mapping[str, Any], key: str) -> list[str]:
    found: list[str] = []
    for name, value in table.items():
        if name == key and value:
            found.append(value)
        elif isinstance(value, Mapping):
            found += _values_of(value, key)
    return found


LARGEST_MERGED = 2_000_000_000
"""Weights of a model into which an engine on a card merges its adapters."""


if TYPE_CHECKING:
    from envs.datasets.module import OwnSources
    from envs.sandbox import SandboxState
    from envs.types import Task

# What vLLM can reserve for adapters that stay unmerged.
NATIVE_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What the checks found: the folder of the base model, and the walls around the code tool on this machine."""

    model_path: Path
    sandbox: "SandboxState | None"


def check_before_start(config: RunConfig, *, with_prm: bool = False, download: bool = True) -> Ready:
    """All that a training run needs, the quick checks first, the network last. Creates nothing.

    `with_prm`: the run trains a process reward model of its own. The run folder may hold a run of the same
    configuration. Without `download` no weights are fetched from the model hub, only a model's small files. Raises
    PreflightError and ApiKeyError.
    """
    _check_run_folder(config)
    if config.backend.type != "vllm":
        raise PreflightError(
            f"backend.type = '{config.backend.type}' is for solve and evaluate: a server tells no log-probs, so "
            "nothing it samples can be trained on; leave it out"
        )
    sandbox = _check_settings(config)
    if with_prm:
        check_labelling(config)
        check_judge_key(config)
    _check_tasks(config, training=True)
    if config.reward.prm_path:
        check_prm(Path(config.reward.prm_path))
    _check_merging(config)
    model_path = check_model(config, download=download)
    _check_prompt_fits(config, model_path)
    return Ready(model_path=model_path, sandbox=sandbox)


def notes_before_start(config: RunConfig) -> list[str]:
    """What is no reason to refuse a run that passed its checks, and must be known before its numbers are believed."""
    from envs.datasets.own import OWN, own_tasks
    from envs.leakage import find_leaks

    notes = []
    for name in sorted({*config.envs.mix} & {*config.evaluation_mix} & {*OWN}):
        halves = own_tasks(name, Path(config.envs.data_path) if config.envs.data_path else None)
        questions = [(task.id, task.question) for task in halves["train"]]
        if leaks := find_leaks(questions, [task.question for task in halves["eval"]]):
            notes.append(
                f"{len(leaks)} of {len(questions)} training questions of {name} read like a held-out one, first "
                f"{leaks[0]}: the same in other words, or made from one template. What is learnt by heart may count as "
                'solved; keep such questions in one half by a field "split"'
            )
    return notes


def check_before_acting(config: RunConfig, *, draws_tasks: bool) -> "SandboxState | None":
    """What commands that only act need: as `check_before_start`, without a run folder. Raises PreflightError."""
    sandbox = _check_settings(config)
    if draws_tasks:
        _check_tasks(config, training=False)
    if config.backend.type == "vllm":
        _check_prompt_fits(config, check_model(config))
    return sandbox


def check_labelling(config: RunConfig) -> None:
    """Whether the recipe's labeller can label the recipe's tasks. Raises PreflightError."""
    from envs.datasets.families import FAMILIES

    labeller = config.label.type
    if labeller != "monte_carlo" and not isinstance(config.agent, PlannerAgentConfig):
        raise PreflightError(
            f"label.type = '{labeller}' knows the planner's decisions only, not those of agent.type = "
            f"'{config.agent.type}'; use 'monte_carlo', or outcomes alone: reward.credit=outcome"
        )
    foreign = [name for name, share in config.envs.mix.items() if share > 0 and name not in FAMILIES]
    if labeller == "plan" and foreign:
        raise PreflightError(
            f"label.type = 'plan' knows the right steps of generated tasks only ({', '.join(FAMILIES)}), not of "
            f"'{foreign[0]}' in envs.mix; use 'monte_carlo' or 'judge', or outcomes alone: reward.credit=outcome"
        )


def check_sandbox(config: EnvsConfig) -> "SandboxState | None":
    """Start the code tool's sandbox, where the planner has this tool, and end it. Raises PreflightError."""
    if "code" not in config.actions:
        return None
    from envs.sandbox import SandboxRefusedError
    from envs.tools.toolbox import open_sandbox

    try:
        with open_sandbox(config) as sandbox:
            return sandbox.state
    except SandboxRefusedError as error:
        others = json.dumps([action for action in config.actions if action != "code"])
        raise PreflightError(f"{error}, or leave 'code' out: envs.actions='{others}'") from error


def _check_settings(config: RunConfig) -> "SandboxState | None":
    """What the configuration and the machine say by themselves."""
    if config.backend.type == "vllm":
        check_machine(config)
    check_recipe(config)
    if config.envs.data_path and not Path(config.envs.data_path).is_file():
        raise PreflightError(f"envs.data_path = '{config.envs.data_path}' is no file; name one, or leave it out")
    _check_own_code(config)
    if not isinstance(config.agent, PlannerAgentConfig):
        return None
    sandbox = check_sandbox(config.envs)
    _check_tools(config)
    _check_examples(config)
    return sandbox


def check_recipe(config: RunConfig) -> None:
    """What the configuration says by itself, wherever it will run. Raises PreflightError and ApiKeyError."""
    from envs.datasets.families import FAMILIES
    from envs.datasets.registry import LOADERS

    known = (*config.envs.datasets, *LOADERS)
    if taken := [name for name in config.envs.datasets if name in LOADERS]:
        raise PreflightError(f"envs.datasets.{taken[0]}: '{taken[0]}' is a built-in data set; give yours another name")
    for key, mix in (("envs.mix", config.envs.mix), ("evaluation.mix", config.evaluation_mix)):
        unknown = [name for name in mix if name not in LOADERS and name not in config.envs.datasets]
        if unknown:
            raise PreflightError(
                f"{key} names unknown data set '{unknown[0]}'; known: {', '.join(known)}"
                f"{did_you_mean(unknown[0], known)}"
            )
    if config.envs.choice == "learnable":
        _check_choice([name for name, share in config.envs.mix.items() if share > 0], tuple(FAMILIES))
    check_nothing_secret_is_written(config)
    check_trackers(config.trackers)
    rank = config.model.lora_rank
    if config.rollout.engine.adapter_mode == "native" and rank not in NATIVE_LORA_RANKS:
        raise PreflightError(
            f"model.lora_rank = {rank} does not fit rollout.engine.adapter_mode = 'native'; "
            f"use one of {', '.join(map(str, NATIVE_LORA_RANKS))}"
        )


def _check_merging(config: RunConfig) -> None:
    """Whether every new version is merged in seconds. Raises PreflightError."""
    from ray_jobs.plan.shapes import PlanError, read_shape

    if (config.rollout.engine.device, config.rollout.engine.adapter_mode) != ("cuda", "merged"):
        return
    folder = resolve_model(config.model.path, weights=False)
    with suppress(PlanError):
        count = read_shape(json.loads((folder / "config.json").read_text()), name=config.model.path).num_parameters
        if count > LARGEST_MERGED:
            raise PreflightError(
                "rollout.engine.adapter_mode = 'merged' reads all weights and folds the adapter in on the CPU "
                f"for every version, which takes minutes for the {count:,} of '{config.model.path}' (at most "
                f"{LARGEST_MERGED:,}); on a card set rollout.engine.adapter_mode=native"
            )


def _check_choice(names: Sequence[str], families: Sequence[str]) -> None:
    """Whether there is something to choose from. Raises PreflightError."""
    rule = (
        f"envs.choice = 'learnable' chooses between families of generated tasks ({', '.join(families)}), and envs.mix"
    )
    if others := [name for name in names if name not in families]:
        raise PreflightError(f"{rule} names '{others[0]}', which is none; leave it out, or set envs.choice = 'mix'")
    if len(names) < 2:
        raise PreflightError(f"{rule} names one, '{names[0]}'; name another, or set envs.choice = 'mix'")


def _check_tools(config: RunConfig) -> None:
    """All but the code tool, whose sandbox is checked by itself."""
    from envs.tools.keys import ToolSetupError
    from envs.tools.toolbox import Toolbox

    async def nobody(prompt: str) -> str:
        return ""

    others = config.envs.model_copy(update={"actions": tuple(set(config.envs.actions) - {"code"})})
    try:
        # The engine that `base_generator` may ask is there only once the run has begun.
        Toolbox(others, own_model=nobody if config.backend.type == "vllm" else None).close()
    except ToolSetupError as error:
        raise PreflightError(str(error)) from error


def _check_examples(config: RunConfig) -> None:
    """Whether the planner could write what its examples show. Raises PreflightError."""
    from envs.tools.function_tool import function_schemas
    from rollout.agent.planner import FormatError, parse_decision

    schemas = function_schemas(config.envs)
    for number, example in enumerate(config.rollout.prompt.examples, start=1):
        for line in example.splitlines():
            try:
                if line.startswith("{"):
                    parse_decision(line, config.envs.actions, schemas)
            except FormatError as error:
                raise PreflightError(
                    f"rollout.prompt.examples: example {number} shows {line[:80]!r}, which this planner cannot write: "
                    f"{error}"
                ) from None


def _check_examples_are_not_asked(config: RunConfig, asked: "Sequence[Task]") -> None:
    """An example that solves a held-out task would be counted as solving it. Raises PreflightError."""
    from envs.datasets.split import question_key

    shown = {
        question_key(one.removeprefix("Task: ").partition("\n{")[0]): number
        for number, one in enumerate(config.rollout.prompt.examples, start=1)
    }
    for task in asked:
        if number := shown.get(question_key(task.question)):
            raise PreflightError(
                f"rollout.prompt.examples: example {number} solves {task.id}, a held-out task; take another"
            )


def _check_prompt_fits(config: RunConfig, model_path: Path) -> None:
    """Whether instructions and examples of one's own leave room for the turns. Raises PreflightError."""
    from rollout.agent.agent import check_chat
    from rollout.agent.planner import system_prompt

    rollout = config.rollout
    if rollout.prompt == PromptConfig():
        return
    count = len(check_chat(model_path).prompt(system_prompt([], rollout.prompt), ""))
    turns = rollout.max_steps * rollout.max_turn_tokens
    if count + turns >= rollout.engine.max_model_len:
        raise PreflightError(
            f"rollout.prompt takes {count} tokens, and rollout.max_steps * max_turn_tokens = {turns}: together they "
            f"leave no room for task and results in rollout.engine.max_model_len = {rollout.engine.max_model_len}; "
            "shorten it, or raise that"
        )


def check_same_run(config: RunConfig, folder: Path) -> None:
    """Whether a run folder was begun with this configuration. Raises PreflightError."""
    try:
        begun = RunConfig.model_validate_json((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise PreflightError(
            f"run folder '{folder}' holds a run whose config.json cannot be read ({type(error).__name__}); choose "
            "another name=..."
        ) from error
    if _work(begun) != _work(config):
        parts = [key for key in RunConfig.model_fields if getattr(_work(begun), key) != getattr(_work(config), key)]
        raise PreflightError(
            f"run folder '{folder}' holds a run with other settings ({', '.join(parts)}); choose another name=...; "
            f"`agentflow resume {shlex.quote(str(folder))}` continues that run with its own"
        )


def _work(config: RunConfig) -> RunConfig:
    """The configuration but for the learner's ranks, of which its checkpoints know nothing, and for where the folder
    is: a run may be moved."""
    learner = config.learner.model_copy(update={"num_workers": 1, "zero_stage": 1})
    return config.model_copy(update={"learner": learner, "output_dir": "", "name": "", "code_path": None})


def _check_run_folder(config: RunConfig) -> None:
    """Two runs never share a folder; one with a config.json is a run."""
    folder = config.run_path
    if (folder / "config.json").exists():
        check_same_run(config, folder)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "may not be written to" if nearest.is_dir() else "is no folder"
        raise PreflightError(
            f"run folder '{folder}' is not writable ('{nearest}' {why}); set output_dir=... to one that is"
        )


def _check_tasks(config: RunConfig, *, training: bool) -> None:
    """Draw every kind of task once: files are read, public data sets downloaded, counts compared."""
    from envs.datasets.module import OwnSources
    from envs.datasets.sampler import cold_start_tasks, held_out_tasks, training_tasks

    mix, seed = config.envs.mix, config.seed
    path = Path(config.envs.data_path) if config.envs.data_path else None
    try:
        own = OwnSources.of(config)
        count = config.evaluation.num_tasks
        asked = held_out_tasks(config.evaluation_mix, count=count, seed=seed, path=path, own=own)
        _check_examples_are_not_asked(config, asked)
        if training:
            training_tasks(config)
        _check_references({*mix, *config.evaluation_mix}, path, own)
        if training:
            cold_start_tasks(config)
    except (ValueError, OSError, KeyError) as error:
        held_out = "" if config.evaluation.mix is None else f" or evaluation.mix = {_shown(config.evaluation.mix)}"
        raise PreflightError(
            f"the tasks of envs.mix = {_shown(mix)}{held_out} cannot be drawn: {reason(error)}"
        ) from error


def _check_own_code(config: RunConfig) -> None:
    """Whether there is what the recipe names, as module:name or command, and can be called. Raises OwnCodeError and
    ProgramError."""
    if isinstance(config.learner.loss, CustomLossConfig):
        config.learner.loss.load()
    if config.reward.scorer:
        from reward.scorers.own import scorer_of

        scorer_of(config.reward.scorer)
    if not isinstance(config.agent, PlannerAgentConfig):
        from rollout.agent.demonstrations import check_demonstrations
        from rollout.agent.own import build_solving

        build_solving(config.agent, config.code_path)
        check_demonstrations(config.cold_start)


def _check_references(names: set[str], path: Path | None, own: "OwnSources") -> None:
    """A reference that its own comparison does not take for right can never be met. A scorer of one's own is asked
    once. Raises ValueError and OwnCodeError."""
    from reward.scorers import score_answer

    asked: set[str] = set()
    for task in _own_tasks(names, path, own):
        scorer = task.scorer or task.dataset
        if scorer in own.datasets:
            raise ValueError(
                f"nobody scores {task.id}: set envs.datasets.{scorer}.scorer or reward.scorer, or give the task one"
            )
        if ":" in scorer and scorer in asked:
            continue
        asked.add(scorer)
        place = "" if task.dataset in own.datasets else f"{path}: "
        wrong = f"{place}{task.id} has the answer {task.answer!r:.80}, which is none for '{scorer}'"
        try:
            score = score_answer(task, task.answer.split("\n")[0])
        except ValueError as error:
            raise ValueError(wrong) from error
        if ":" not in scorer and score != 1.0:
            raise ValueError(wrong)


def _own_tasks(names: set[str], path: Path | None, own: "OwnSources") -> "Iterator[Task]":
    """The tasks of all data sets of one's own, with their scorers."""
    from envs.datasets.module import module_tasks
    from envs.datasets.own import OWN, own_tasks

    for name in sorted(names.intersection((*OWN, *own.datasets))):
        found: Mapping[Any, list[Task]]
        if name in own.datasets:
            found = module_tasks(name, own.datasets[name], own.with_teacher)
        else:
            found = own_tasks(name, path)
        yield from (own.scored(task) for part in found.values() for task in part)


def _shown(mix: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{name} = {share}" for name, share in mix.items()) + "}"
