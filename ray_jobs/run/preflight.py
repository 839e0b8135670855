"""Checks before anything starts: this machine, the keys, the run folder, and what the recipe names.

Rules of the configuration alone are validators of `configs`. The checks of tasks are in `task_checks`, those of models
in `model_folder`.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from configs.api_keys import ApiKeyError, certain_key, find_key, how_to_set, written_secret
from configs.errors import UserError
from configs.learner import CustomLossConfig
from configs.reward import JudgeLabelConfig
from configs.rollout import PlannerAgentConfig, PromptConfig
from configs.run import RunConfig
from ray_jobs.run.model_folder import check_model
from ray_jobs.run.task_checks import check_mixes, check_tasks, prm_tasks
from ray_jobs.run.trackers import check_trackers

if TYPE_CHECKING:
    from envs.sandbox import SandboxState

NATIVE_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM can reserve memory for unmerged adapters."""
MIN_DRIVER = 580
"""The driver of CUDA 13, for which torch and vLLM of requirements-gpu.lock are built."""


class Ready(NamedTuple):
    model_path: Path
    sandbox: "SandboxState | None"
    """The isolation of the code tool on this machine; None without a code tool."""


def check_before_start(config: RunConfig, *, with_prm: bool = False, download: bool = True) -> Ready:
    """Check everything that a training run needs, the quick checks first, the network last. Raises UserError.

    `with_prm` says whether the run trains a process reward model. Without `download`, only the small files of a model
    come from the hub.
    """
    folder = config.run_path
    config.cluster.check_joined()
    if config.backend.type != "vllm":
        raise UserError(
            f"backend.type = '{config.backend.type}' is for solve and evaluate: training needs log-probs, which a "
            "server does not return; leave it out"
        )
    sandbox = _check_settings(config)
    if with_prm:
        if not (folder / "config.json").exists() and (folder / "collected" / "groups.jsonl").exists():
            raise UserError(
                f"'{folder}/collected' holds attempts of `agentflow train-prm`, but this run learns its PRM from its "
                f"own policy's; choose another name=..., or {shlex.quote(f'reward.credit.prm_path={folder}/prm')}"
            )
        check_labelling(config)
        check_judge_key(config)
    check_tasks(config, training=True)
    if with_prm:
        prm_tasks(config)
    if config.reward.prm_path and not Path(config.reward.prm_path, "prm.json").is_file():
        raise UserError(
            f"reward.credit.prm_path = '{config.reward.prm_path}' holds no process reward model; name the prm/ folder "
            "of a run that trained one (`agentflow train` or `agentflow train-prm`), or leave it out"
        )
    model_path = check_model(config, training=True, download=download)
    _check_prompt_fits(config, model_path)
    return Ready(model_path=model_path, sandbox=sandbox)


def check_before_acting(config: RunConfig, *, draws_tasks: bool) -> "SandboxState | None":
    """Check what a command without training needs: as `check_before_start`, but without a run folder."""
    sandbox = _check_settings(config)
    if draws_tasks:
        check_tasks(config, training=False)
    if config.backend.type == "vllm":
        _check_prompt_fits(config, check_model(config))
    return sandbox


def check_recipe(config: RunConfig) -> None:
    """Check what does not depend on the machine that the recipe will run on."""
    check_mixes(config)
    check_nothing_secret_is_written(config)
    rank = config.model.lora_rank
    if config.rollout.engine.adapter_mode == "native" and rank not in NATIVE_LORA_RANKS:
        raise UserError(
            f"model.lora_rank = {rank} does not fit rollout.engine.adapter_mode = 'native'; "
            f"use one of {', '.join(map(str, NATIVE_LORA_RANKS))}"
        )


def check_labelling(config: RunConfig) -> None:
    """Check that the recipe's labeller can label the recipe's tasks."""
    from envs.datasets.families import FAMILIES

    if config.label.type != "plan":
        return
    if not isinstance(config.agent, PlannerAgentConfig):
        raise UserError(
            f"label.type = 'plan' labels decisions of the planner, not of agent.type = '{config.agent.type}'; "
            "use 'monte_carlo' or 'judge', or reward.credit=outcome"
        )
    if foreign := [name for name, share in config.envs.mix.items() if share > 0 and name not in FAMILIES]:
        raise UserError(
            f"label.type = 'plan' needs generated tasks ({', '.join(FAMILIES)}), and envs.mix names '{foreign[0]}'; "
            "use 'monte_carlo' or 'judge', or reward.credit=outcome"
        )


def _check_settings(config: RunConfig) -> "SandboxState | None":
    """Check machine, recipe, custom code and tools. Return the state of the code tool's sandbox; None without it."""
    from envs.sandbox import SandboxRefusedError
    from envs.tools.toolbox import Toolbox

    async def no_answer(prompt: str) -> str:
        return ""

    if config.backend.type == "vllm":
        check_machine(config)
    check_recipe(config)
    check_trackers(config.trackers)
    _check_custom_code(config)
    if not isinstance(config.agent, PlannerAgentConfig):
        return None
    try:
        # The engine that `base_generator` asks starts only with the run.
        with Toolbox(config.envs, own_model=no_answer if config.backend.type == "vllm" else None) as tools:
            return tools.sandbox
    except SandboxRefusedError as error:
        raise UserError(
            f"{error}, or leave 'code' out of envs.actions, with cold_start.num_demonstrations=0"
        ) from error


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
        raise UserError(
            f"agent.prompt takes {count} tokens, and agent.max_steps * rollout.max_turn_tokens = {turns}: no room is "
            f"left in rollout.engine.max_model_len = {rollout.engine.max_model_len}; shorten the prompt, or raise that"
        )


def _check_custom_code(config: RunConfig) -> None:
    """Load what the recipe names as module:name or as a command."""
    from reward.scorers.custom import CustomTurnScorer, scorer_of

    if isinstance(config.learner.loss, CustomLossConfig):
        config.learner.loss.load()
    if config.reward.scorer:
        scorer_of(config.reward.scorer)
    if config.reward.turn_scorer:
        CustomTurnScorer(config.reward.turn_scorer, limit_s=config.reward.timeout_s)
    if not isinstance(config.agent, PlannerAgentConfig):
        from rollout.agent.custom import build_solving
        from rollout.agent.demonstrations import check_demonstrations

        build_solving(config.agent, config.code_path)
        check_demonstrations(config.cold_start)


# -------------------------------------------------------------------------------------------- keys


def key_variables(config: RunConfig) -> tuple[str, ...]:
    """Return the environment variables with the keys that the recipe or its tools need."""
    from envs.tools.search import TAVILY_KEY_VARIABLE

    names = [value for key, value in leaves(config.model_dump()) if key.endswith("api_key_env") and value]
    envs = config.envs
    finders: set[object] = {envs.web.finder if "web_search" in envs.actions else None}
    finders.add(envs.search if "search" in envs.actions else None)
    if "tavily" in finders:
        names.append(TAVILY_KEY_VARIABLE)
    return tuple(dict.fromkeys(names))


def check_judge_key(config: RunConfig) -> None:
    if isinstance(config.label, JudgeLabelConfig):
        check_key("label.judge.api_key_env", config.label.judge.api_key_env)


def check_key(setting: str, variable: str | None) -> None:
    if variable is not None and not find_key(variable):
        raise ApiKeyError(
            f"{setting} names {variable}, which is not set; {how_to_set(variable)}, or leave it out for a server that "
            "needs no key"
        )


def check_nothing_secret_is_written(config: RunConfig, words: Sequence[str] = ()) -> None:
    """Check that settings, command line and `words` hold no key: run folder, report and process list show them."""
    texts = (str(value) for _, value in leaves(config.model_dump(mode="json")))
    text = "\n".join((*texts, *sys.argv, *words))
    if found := written_secret(text, key_variables(config)) or certain_key(text):
        raise ApiKeyError(
            f"the settings or the command hold a key ({found}), and the run folder would show it; take it out, put it "
            "into an environment variable, and name that one with the setting's api_key_env"
        )


def leaves(value: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables with their dotted keys, and every key as a value of its own without a key."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield "", name
            yield from leaves(part, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part, key)
    else:
        yield key, value


# ----------------------------------------------------------------------------------------- machine


def card_driver() -> str | None:
    """Return the version of the card's driver; None without a card."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    first = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.partition("\n")[0].strip()
    return first if first[:1].isdigit() else None


def driver_error(driver: str) -> str | None:
    """Return why CUDA 13 does not run on a driver; None if it does."""
    if int(driver.partition(".")[0]) >= MIN_DRIVER:
        return None
    return f"the card's driver is {driver}, and CUDA 13 needs {MIN_DRIVER} or newer; update the driver"


def check_machine(config: RunConfig) -> None:
    """Check that this machine has a card if the recipe needs one. The launch checks that all parts have room."""
    devices = {config.rollout.engine.device, config.learner.device, config.reward.prm and config.prm.device}
    if "cuda" not in devices or config.cluster.joined is not None:
        return  # in a cluster that was joined, the models run on other machines
    if (driver := card_driver()) is None:
        raise UserError(
            "the recipe's device is 'cuda', and this machine has no CUDA GPU; use a CPU recipe, or set "
            "rollout.engine.device=cpu learner.device=cpu prm.device=cpu"
        )
    if error := driver_error(driver):
        raise UserError(f"{error}, or use a CPU recipe")
