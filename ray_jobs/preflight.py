"""Checks before anything starts: a run that cannot work ends here, with one line that says what to do."""

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.envs import EnvsConfig
from configs.run import RunConfig
from configs.spelling import did_you_mean
from configs.wording import reason
from ray_jobs.machine import check_machine
from ray_jobs.model_folder import PreflightError, check_model, check_prm
from ray_jobs.recipe_keys import check_judge_key, check_nothing_secret_is_written

if TYPE_CHECKING:
    from envs.sandbox import SandboxState

# What vLLM can reserve for adapters that stay unmerged.
NATIVE_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What the checks found: the folder of the base model, and the walls around the code tool on this machine."""

    model_path: Path
    sandbox: "SandboxState | None"


def check_before_start(
    config: RunConfig, *, with_prm: bool = False, resume: bool = False, download: bool = True
) -> Ready:
    """All that a training run needs, the quick checks first, the network last. Creates nothing.

    `with_prm`: the run trains a process reward model of its own. With `resume` the run folder may hold an unfinished
    run of the same configuration. Without `download` no weights are fetched from the model hub, only a model's small
    files. Raises PreflightError and ApiKeyError.
    """
    if with_prm:
        check_labelling(config)
        check_judge_key(config)
    if config.backend.kind != "vllm":
        raise PreflightError(
            f"backend.kind = '{config.backend.kind}' is for solve and evaluate: a server tells no log-probs, so "
            "nothing it samples can be trained on; leave it out"
        )
    sandbox = _check_settings(config)
    folder = Path(config.output_dir) / config.name
    if resume and (folder / "config.json").exists():
        check_same_run(config, folder)
    else:
        _check_run_folder(folder)
    _check_tasks(config, training=True)
    if config.reward.prm_path:
        check_prm(Path(config.reward.prm_path))
    return Ready(model_path=check_model(config, download=download), sandbox=sandbox)


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
    if config.backend.kind == "vllm":
        check_model(config)
    return sandbox


def check_labelling(config: RunConfig) -> None:
    """Whether the recipe's labeller can label the recipe's tasks. Raises PreflightError."""
    from envs.datasets.families import FAMILIES

    labeller = config.label.labeller
    foreign = [name for name, share in config.envs.mix.items() if share > 0 and name not in FAMILIES]
    if labeller == "plan" and foreign:
        raise PreflightError(
            f"label.labeller = 'plan' knows the right steps of generated tasks only ({', '.join(FAMILIES)}), not of "
            f"'{foreign[0]}' in envs.mix; use 'monte_carlo' or 'judge'"
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
    if config.backend.kind == "vllm":
        check_machine(config)
    check_recipe(config)
    if config.envs.data_path and not Path(config.envs.data_path).is_file():
        raise PreflightError(f"envs.data_path = '{config.envs.data_path}' is no file; name one, or leave it out")
    sandbox = check_sandbox(config.envs)
    _check_tools(config)
    return sandbox


def check_recipe(config: RunConfig) -> None:
    """What the configuration says by itself, wherever it will run. Raises PreflightError and ApiKeyError."""
    from envs.datasets.registry import LOADERS

    for key, mix in (("envs.mix", config.envs.mix), ("evaluation.mix", config.evaluation_mix)):
        unknown = [name for name in mix if name not in LOADERS]
        if unknown:
            raise PreflightError(
                f"{key} names unknown data set '{unknown[0]}'; known: {', '.join(LOADERS)}"
                f"{did_you_mean(unknown[0], LOADERS)}"
            )
    check_nothing_secret_is_written(config)
    rank = config.model.lora_rank
    if config.rollout.engine.adapter_mode == "native" and rank not in NATIVE_LORA_RANKS:
        raise PreflightError(
            f"model.lora_rank = {rank} does not fit rollout.engine.adapter_mode = 'native'; "
            f"use one of {', '.join(map(str, NATIVE_LORA_RANKS))}"
        )


def _check_tools(config: RunConfig) -> None:
    """All but the code tool, whose sandbox is checked by itself."""
    from envs.tools.keys import ToolSetupError
    from envs.tools.toolbox import Toolbox

    async def nobody(prompt: str) -> str:
        return ""

    others = config.envs.model_copy(update={"actions": tuple(set(config.envs.actions) - {"code"})})
    try:
        # The engine that `base_generator` may ask is there only once the run has begun.
        Toolbox(others, own_model=nobody if config.backend.kind == "vllm" else None).close()
    except ToolSetupError as error:
        raise PreflightError(str(error)) from error


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
    return config.model_copy(update={"learner": learner, "output_dir": "", "name": ""})


def _check_run_folder(folder: Path) -> None:
    """A folder with a config.json is a run, finished or not, and two runs never share a folder."""
    if (folder / "config.json").exists():
        state, command, does = (
            ("a finished run", "view", "shows it")
            if (folder / "summary.json").exists()
            else ("an unfinished run", "resume", "continues it")
        )
        raise PreflightError(
            f"run folder '{folder}' holds {state}; choose another name=...; "
            f"`agentflow {command} {shlex.quote(str(folder))}` {does}"
        )
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "may not be written to" if nearest.is_dir() else "is no folder"
        raise PreflightError(
            f"run folder '{folder}' is not writable ('{nearest}' {why}); set output_dir=... to one that is"
        )


def _check_tasks(config: RunConfig, *, training: bool) -> None:
    """Draw every kind of task once: files are read, public data sets downloaded, counts compared."""
    from envs.datasets.sampler import TaskSampler, demonstration_tasks, held_out_tasks

    mix, seed = config.envs.mix, config.seed
    path = Path(config.envs.data_path) if config.envs.data_path else None
    try:
        held_out_tasks(config.evaluation_mix, count=config.evaluation.num_tasks, seed=seed, path=path)
        if training:
            TaskSampler(mix, seed=seed, path=path)
        _check_own_answers({*mix, *config.evaluation_mix}, path)
        if training and config.cold_start.num_demonstrations:
            demonstration_tasks(mix, count=config.cold_start.num_demonstrations, seed=seed)
    except (ValueError, OSError, KeyError) as error:
        held_out = "" if config.evaluation.mix is None else f" or evaluation.mix = {_shown(config.evaluation.mix)}"
        raise PreflightError(
            f"the tasks of envs.mix = {_shown(mix)}{held_out} cannot be drawn: {reason(error)}"
        ) from error


def _check_own_answers(names: set[str], path: Path | None) -> None:
    """A reference that its own scorer does not take for right can never be met. Raises ValueError."""
    from envs.datasets.own import OWN, own_tasks
    from reward.scorers import score_answer

    for name in sorted(names.intersection(OWN)):
        for task in (task for half in own_tasks(name, path).values() for task in half):
            if score_answer(task, task.answer.split("\n")[0]) != 1.0:
                raise ValueError(f"{path}: {task.id} has the answer {task.answer!r}, which is none for '{name}'")


def _shown(mix: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{name} = {share}" for name, share in mix.items()) + "}"
