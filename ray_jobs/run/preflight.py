"""Checks before anything starts: this machine, the keys, the run folder, and what the recipe names.

Rules of the configuration alone are validators of `configs`. The checks of tasks are in `task_checks`, those of models
in `model_folder`.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.api_keys import ApiKeyError, certain_key, find_key, how_to_set, written_secret
from configs.cluster import RANK_SHARE
from configs.errors import unwritable
from configs.learner import CustomLossConfig, PlansConfig
from configs.loading import with_changes
from configs.reward import JudgeLabelConfig
from configs.rollout import PlannerAgentConfig, PromptConfig
from configs.run import RunConfig
from ray_jobs.run.model_folder import PreflightError, check_model, check_prm
from ray_jobs.run.task_checks import check_mixes, check_tasks, prm_tasks
from ray_jobs.run.trackers import check_trackers

if TYPE_CHECKING:
    from envs.sandbox import SandboxState

NATIVE_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM can reserve memory for unmerged adapters."""
MIN_DRIVER = 580
"""The driver of CUDA 13, for which torch and vLLM of requirements-gpu.lock are built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The result of the checks."""

    model_path: Path
    """The folder of the base model."""
    sandbox: "SandboxState | None"
    """The isolation of the code tool on this machine; None without a code tool."""


def check_before_start(config: RunConfig, *, with_prm: bool = False, download: bool = True) -> Ready:
    """Check everything that a training run needs, the quick checks first, the network last. Create nothing.

    Args:
        config: The configuration; its run folder may hold an unfinished run of the same configuration.
        with_prm: Whether the run trains a process reward model.
        download: Whether to download weights from the model hub, and not only a model's small files.

    Raises:
        PreflightError, ApiKeyError: The run cannot start.
    """
    folder = config.run_path
    if (folder / "config.json").exists():
        check_same_run(config, folder)
    if why := unwritable(folder):
        raise PreflightError(f"run folder '{folder}' is not writable ({why}); set output_dir=... to a writable one")
    if config.backend.type != "vllm":
        raise PreflightError(
            f"backend.type = '{config.backend.type}' is for solve and evaluate: training needs log-probs, which a "
            "server does not return; leave it out"
        )
    sandbox = _check_settings(config, training=True)
    if with_prm:
        if not (folder / "config.json").exists() and (folder / "collected" / "groups.jsonl").exists():
            raise PreflightError(
                f"'{folder}/collected' holds trajectories of `agentflow collect`, but this run learns its PRM from its "
                f"own policy's; choose another name=..., or {shlex.quote(f'reward.credit.prm_path={folder}/prm')}"
            )
        check_labelling(config)
        check_judge_key(config)
    check_tasks(config, training=True)
    if with_prm:
        prm_tasks(config)
    if config.reward.prm_path:
        check_prm(Path(config.reward.prm_path))
    model_path = check_model(config, training=True, download=download)
    _check_prompt_fits(config, model_path)
    return Ready(model_path=model_path, sandbox=sandbox)


def check_before_acting(config: RunConfig, *, draws_tasks: bool) -> "SandboxState | None":
    """Check what a command without training needs: as `check_before_start`, but without a run folder."""
    sandbox = _check_settings(config, training=False)
    if draws_tasks:
        check_tasks(config, training=False)
    if config.backend.type == "vllm":
        _check_prompt_fits(config, check_model(config))
    return sandbox


def check_recipe(config: RunConfig) -> None:
    """Check the configuration alone, independent of the machine that it will run on."""
    check_mixes(config)
    check_nothing_secret_is_written(config)
    rank = config.model.lora_rank
    if config.rollout.engine.adapter_mode == "native" and rank not in NATIVE_LORA_RANKS:
        raise PreflightError(
            f"model.lora_rank = {rank} does not fit rollout.engine.adapter_mode = 'native'; "
            f"use one of {', '.join(map(str, NATIVE_LORA_RANKS))}"
        )


def check_labelling(config: RunConfig) -> None:
    """Check that the recipe's labeller can label the recipe's tasks."""
    from envs.datasets.families import FAMILIES

    labeller = config.label.type
    if labeller != "monte_carlo" and not isinstance(config.agent, PlannerAgentConfig):
        raise PreflightError(
            f"label.type = '{labeller}' labels decisions of the planner, not of agent.type = '{config.agent.type}'; "
            "use 'monte_carlo', or reward.credit=outcome"
        )
    foreign = [name for name, share in config.envs.mix.items() if share > 0 and name not in FAMILIES]
    if labeller == "plan" and foreign:
        raise PreflightError(
            f"label.type = 'plan' needs generated tasks ({', '.join(FAMILIES)}), and envs.mix names '{foreign[0]}'; "
            "use 'monte_carlo' or 'judge', or reward.credit=outcome"
        )


def check_sandbox(config: RunConfig, *, training: bool) -> "SandboxState | None":
    """Start and end the code tool's sandbox if the planner has this tool."""
    actions, cold_start = config.envs.actions, config.cold_start
    if "code" not in actions:
        return None
    from envs.sandbox import SandboxRefusedError
    from envs.tools.toolbox import open_sandbox

    try:
        with open_sandbox(config.envs) as sandbox:
            return sandbox.state
    except SandboxRefusedError as error:
        without = f"envs.actions='{json.dumps([action for action in actions if action != 'code'])}'"
        if training and isinstance(cold_start, PlansConfig) and cold_start.num_demonstrations:
            # Every demonstrated plan of a generated task uses the code tool.
            without += " cold_start.num_demonstrations=0"
        raise PreflightError(f"{error}, or leave 'code' out: {without}") from error


def _check_settings(config: RunConfig, *, training: bool) -> "SandboxState | None":
    if config.backend.type == "vllm":
        check_machine(config)
    check_recipe(config)
    check_trackers(config.trackers)
    if config.envs.data_path and not Path(config.envs.data_path).is_file():
        raise PreflightError(f"envs.data_path = '{config.envs.data_path}' is not a file; name one, or leave it out")
    _check_custom_code(config)
    if not isinstance(config.agent, PlannerAgentConfig):
        return None
    sandbox = check_sandbox(config, training=training)
    _check_tools(config)
    _check_examples(config)
    return sandbox


def _check_tools(config: RunConfig) -> None:
    """Open all tools but the code tool, which `check_sandbox` checks."""
    from configs.errors import UserError
    from envs.tools.toolbox import Toolbox

    async def no_answer(prompt: str) -> str:
        return ""

    others = config.envs.model_copy(update={"actions": tuple(set(config.envs.actions) - {"code"})})
    try:
        # The engine that `base_generator` asks starts only with the run.
        Toolbox(others, own_model=no_answer if config.backend.type == "vllm" else None).close()
    except UserError as error:
        raise PreflightError(str(error)) from error


def _check_examples(config: RunConfig) -> None:
    """Check that the planner could write the decisions that its examples show."""
    from envs.tools.function_tool import function_schemas
    from rollout.agent.planner import FormatError, parse_decision

    schemas = function_schemas(config.envs)
    for number, example in enumerate(config.planner.prompt.examples, start=1):
        for line in example.split("\n"):
            try:
                if line.startswith("{"):
                    parse_decision(line, config.envs.actions, schemas)
            except FormatError as error:
                raise PreflightError(
                    f"agent.prompt.examples: example {number} has a decision that the planner cannot write "
                    f"({line[:80]!r}): {error}"
                ) from None


def _check_prompt_fits(config: RunConfig, model_path: Path) -> None:
    """Check that custom instructions and examples leave room for the turns."""
    from rollout.agent.agent import check_chat
    from rollout.agent.planner import system_prompt

    rollout, agent = config.rollout, config.planner
    if agent.prompt == PromptConfig():
        return
    count = len(check_chat(model_path).prompt(system_prompt([], agent.prompt), ""))
    turns = agent.max_steps * rollout.max_turn_tokens
    if count + turns >= rollout.engine.max_model_len:
        raise PreflightError(
            f"agent.prompt takes {count} tokens, and agent.max_steps * rollout.max_turn_tokens = {turns}: no room is "
            f"left in rollout.engine.max_model_len = {rollout.engine.max_model_len}; shorten the prompt, or raise that"
        )


def _check_custom_code(config: RunConfig) -> None:
    """Load what the recipe names as module:name or as a command."""
    if isinstance(config.learner.loss, CustomLossConfig):
        config.learner.loss.load()
    if config.reward.scorer:
        from reward.scorers.custom import scorer_of

        scorer_of(config.reward.scorer)
    if config.reward.turn_scorer:
        from reward.scorers.custom import CustomTurnScorer

        CustomTurnScorer(config.reward.turn_scorer, limit_s=config.reward.timeout_s)
    if not isinstance(config.agent, PlannerAgentConfig):
        from rollout.agent.custom import build_solving
        from rollout.agent.demonstrations import check_demonstrations

        build_solving(config.agent, config.code_path)
        check_demonstrations(config.cold_start)


# -------------------------------------------------------------------------------------- run folder


def check_same_run(config: RunConfig, folder: Path) -> None:
    """Check that the run in a folder was started with this configuration."""
    try:
        started = RunConfig.model_validate_json((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise PreflightError(
            f"run folder '{folder}' holds a run whose config.json cannot be read ({type(error).__name__}); choose "
            "another name=..."
        ) from error
    before, now = _without_machine(started), _without_machine(config)
    if before != now:
        parts = [key for key in RunConfig.model_fields if getattr(before, key) != getattr(now, key)]
        raise PreflightError(
            f"run folder '{folder}' holds a run with other settings ({', '.join(parts)}); choose another name=..., or "
            f"continue that run with `agentflow resume {shlex.quote(str(folder))}`"
        )


def _without_machine(config: RunConfig) -> RunConfig:
    """Return the configuration without the settings that may differ when a run continues on another machine."""
    one = {"num_threads": 1}
    learner = config.learner.model_copy(update=one | {"num_workers": 1, "zero_stage": 1})
    engine, prm = config.rollout.engine.model_copy(update=one), config.prm.model_copy(update=one)
    rollout = config.rollout.model_copy(update={"engine": engine, "num_workers": 1, "max_workers": None})
    parts = {"learner": learner, "rollout": rollout, "prm": prm}
    return config.model_copy(update={**parts, "output_dir": "", "name": "", "code_path": None})


# -------------------------------------------------------------------------------------------- keys


def key_variables(config: RunConfig) -> tuple[str, ...]:
    """Return the environment variables with the keys that the recipe or its tools need."""
    from envs.tools import web_search as pages

    names = [value for key, value in _leaves(config.model_dump()) if key == "api_key_env" and value]
    envs = config.envs
    finders = {envs.web.finder} if "web_search" in envs.actions else set()
    if ("search" in envs.actions and envs.search == "tavily") or "tavily" in finders:
        names.append(pages.TAVILY_KEY_VARIABLE)
    if "google_search" in envs.actions or "google" in finders:
        names += [pages.GOOGLE_KEY_VARIABLE, pages.ENGINE_VARIABLE]
    return tuple(dict.fromkeys(names))


def check_judge_key(config: RunConfig) -> None:
    """Check that this machine has the key of the judge that labels."""
    if isinstance(config.label, JudgeLabelConfig):
        check_key("label.judge.api_key_env", config.label.judge.api_key_env)


def check_key(setting: str, variable: str | None) -> None:
    """Check that the variable that a setting names holds a key."""
    try:
        if variable is None or find_key(variable):
            return
    except ApiKeyError as error:
        raise ApiKeyError(f"{setting}: {error}") from None
    raise ApiKeyError(
        f"{setting} names {variable}, which is not set; {how_to_set(variable)}, or leave it out for a server that "
        "needs no key"
    )


def check_nothing_secret_is_written(config: RunConfig, words: Sequence[str] = ()) -> None:
    """Check that settings, command line and `words` hold no key: run folder, report and process list show them."""
    texts = (str(value) for _, value in _leaves(config.model_dump(mode="json")))
    text = "\n".join((*texts, *sys.argv, *words))
    if name := written_secret(text, key_variables(config)):
        raise ApiKeyError(
            f"the settings or the command hold the value of {name}, and the run folder would show it; take it out, and "
            f"name {name} with the setting's api_key_env"
        )
    if where := certain_key(text):
        raise ApiKeyError(
            f"the settings or the command hold a key {where}, and the run folder would show it; take it out, put it "
            "into an environment variable, and name that one with the setting's api_key_env"
        )


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables with their keys, and every key as a value of its own without a key."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield "", name
            yield from _leaves(part, name)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part, key)
    else:
        yield key, value


# ----------------------------------------------------------------------------------------- machine


def card_driver() -> str | None:
    """Return the version of the card's driver; None without a card."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = answer.stdout.strip().partition("\n")[0]
    return first if answer.returncode == 0 and first[:1].isdigit() else None


def driver_error(driver: str) -> str | None:
    """Return why CUDA 13 does not run on a driver; None if it does."""
    if int(driver.partition(".")[0]) >= MIN_DRIVER:
        return None
    return f"the card's driver is {driver}, and CUDA 13 needs {MIN_DRIVER} or newer; update the driver"


def check_machine(config: RunConfig) -> None:
    """Check that this machine has the cores and cards for the recipe; Ray would wait for them without an end."""
    if config.cluster.joined is not None:
        return  # the models run on other machines
    uses_cuda = "cuda" in _devices(config)
    cores, places = len(os.sched_getaffinity(0)), max(2, os.cpu_count() or 1)
    for name, threads in _threads(config).items():
        if threads > cores and not uses_cuda:
            raise PreflightError(f"{name} = {threads} is more than this machine's {cores} cores; set {name}={cores}")
    needed = config.learner.num_workers + config.rollout.num_workers
    if needed > places:
        raise PreflightError(
            f"rollout.num_workers = {config.rollout.num_workers} and the learner need {needed} CPU cores, and this "
            f"machine has {places}; set rollout.num_workers={max(1, places - config.learner.num_workers)}"
        )
    if uses_cuda or (config.reward.prm is not None and config.prm.device == "cuda"):
        _check_cards(config)


def reduced_to_machine(config: RunConfig, report: Callable[[str], None]) -> RunConfig:
    """Return a resumed run's configuration with at most this machine's cores as threads and workers.

    They decide the speed and the rounding of sums, not what the run does.
    """
    if config.cluster.joined is not None or "cuda" in _devices(config):
        return config
    cores, places = len(os.sched_getaffinity(0)), max(2, os.cpu_count() or 1)
    changes = {name: cores for name, threads in _threads(config).items() if threads > cores}
    most = max(1, places - config.learner.num_workers)
    if config.rollout.num_workers > most:
        changes["rollout.num_workers"] = most
    if not changes:
        return config
    report(f"this machine has {cores} cores: continues with {' '.join(f'{key}={n}' for key, n in changes.items())}")
    return with_changes(config, changes)


def _devices(config: RunConfig) -> set[str]:
    return {config.learner.device, config.rollout.engine.device}


def _threads(config: RunConfig) -> dict[str, int]:
    threads = {
        "rollout.engine.num_threads": config.rollout.engine.num_threads,
        "learner.num_threads": config.learner.num_threads,
    }
    return threads | ({"prm.num_threads": config.prm.num_threads} if config.reward.prm is not None else {})


def _check_cards(config: RunConfig) -> None:
    driver = card_driver()
    if driver and (error := driver_error(driver)):
        raise PreflightError(f"{error}, or use a CPU recipe")
    num_gpus = _num_gpus()
    if num_gpus == 0:
        raise PreflightError(
            "the recipe's device is 'cuda', and this machine has no CUDA GPU; use a CPU recipe, or set "
            "rollout.engine.device=cpu rollout.engine.adapter_mode=merged learner.device=cpu prm.device=cpu"
        )
    for key, cards in (
        ("rollout.engine.tensor_parallel", config.rollout.engine.tensor_parallel),
        ("learner.num_workers", config.learner.num_workers if config.learner.device == "cuda" else 1),
    ):
        if cards > num_gpus:
            raise PreflightError(f"{key} = {cards} needs as many cards, and this machine has {num_gpus}; lower it")
    shares = _shares(config)
    free = [1.0] * num_gpus
    for _, share in sorted(shares, key=lambda pair: -pair[1]):
        # Each process goes to the first card with room for it, the largest first.
        place = next((number for number, room in enumerate(free) if room >= share - 1e-9), None)
        if place is None:
            raise PreflightError(
                f"the shares of cards ({', '.join(f'{name} {share:g}' for name, share in shares)}) do not fit on this "
                f"machine's {num_gpus}; lower rollout.num_workers, card.learner, card.engine or card.prm"
            )
        free[place] -= share


def _shares(config: RunConfig) -> list[tuple[str, float]]:
    """Return what each process claims of one card; an engine over several cards claims each of them."""
    card, ranks, spread = config.card, config.learner.num_workers, config.rollout.engine.tensor_parallel
    engine = [("engine", card.engine if spread == 1 else 1.0)] * spread
    engines = config.rollout.num_workers
    if config.shares_card:
        return [("shared card", 1.0), *engine * (engines - 1)]
    shares = [*[("learner", card.learner if ranks == 1 else RANK_SHARE)] * ranks] * (config.learner.device == "cuda")
    shares += engine * engines * (config.rollout.engine.device == "cuda")
    return shares + [("PRM", card.prm)] * (config.reward.prm is not None and config.prm.device == "cuda")


def _num_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    import torch

    return torch.cuda.device_count()
