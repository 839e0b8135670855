"""Checks before anything starts: a run that cannot work ends here, with one line that says what to do."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configs.learner import CustomLossConfig, PlansConfig
from configs.rollout import PlannerAgentConfig, PromptConfig
from configs.run import RunConfig
from configs.wording import unwritable
from ray_jobs.checks.keys import check_judge_key, check_nothing_secret_is_written
from ray_jobs.checks.machine import check_machine
from ray_jobs.checks.tasks import check_mixes, check_tasks, prm_tasks
from ray_jobs.run.model_folder import PreflightError, check_model, check_prm
from ray_jobs.run.trackers import check_trackers

if TYPE_CHECKING:
    from envs.sandbox import SandboxState

NATIVE_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM can reserve for adapters that stay unmerged."""


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
    sandbox = _check_settings(config, training=True)
    if with_prm:
        _check_nothing_collected(config)
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
    """What commands that only act need: as `check_before_start`, without a run folder. Raises PreflightError."""
    sandbox = _check_settings(config, training=False)
    if draws_tasks:
        check_tasks(config, training=False)
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


def check_sandbox(config: RunConfig, *, training: bool) -> "SandboxState | None":
    """Start the code tool's sandbox, where the planner has this tool, and end it. Raises PreflightError."""
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
            # Every plan of a generated task computes.
            without += " cold_start.num_demonstrations=0"
        raise PreflightError(f"{error}, or leave 'code' out: {without}") from error


def _check_settings(config: RunConfig, *, training: bool) -> "SandboxState | None":
    """What the configuration and the machine say by themselves."""
    if config.backend.type == "vllm":
        check_machine(config)
    check_recipe(config)
    check_trackers(config.trackers)
    if config.envs.data_path and not Path(config.envs.data_path).is_file():
        raise PreflightError(f"envs.data_path = '{config.envs.data_path}' is no file; name one, or leave it out")
    _check_own_code(config)
    if not isinstance(config.agent, PlannerAgentConfig):
        return None
    sandbox = check_sandbox(config, training=training)
    _check_tools(config)
    _check_examples(config)
    return sandbox


def check_recipe(config: RunConfig) -> None:
    """What the configuration says by itself, wherever it will run. Raises PreflightError and ApiKeyError."""
    check_mixes(config)
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
        Toolbox(others, own_model=nobody if config.backend.type == "vllm" else None).close()
    except ToolSetupError as error:
        raise PreflightError(str(error)) from error


def _check_examples(config: RunConfig) -> None:
    """Whether the planner could write what its examples show. Raises PreflightError."""
    from envs.tools.own_tool import function_schemas
    from rollout.agent.planner import FormatError, parse_decision

    schemas = function_schemas(config.envs)
    for number, example in enumerate(config.planner.prompt.examples, start=1):
        for line in example.split("\n"):
            try:
                if line.startswith("{"):
                    parse_decision(line, config.envs.actions, schemas)
            except FormatError as error:
                raise PreflightError(
                    f"agent.prompt.examples: example {number} shows {line[:80]!r}, which this planner cannot write: "
                    f"{error}"
                ) from None


def _check_prompt_fits(config: RunConfig, model_path: Path) -> None:
    """Whether instructions and examples of one's own leave room for the turns. Raises PreflightError."""
    from rollout.agent.agent import check_chat
    from rollout.agent.planner import system_prompt

    rollout, agent = config.rollout, config.planner
    if agent.prompt == PromptConfig():
        return
    count = len(check_chat(model_path).prompt(system_prompt([], agent.prompt), ""))
    turns = agent.max_steps * rollout.max_turn_tokens
    if count + turns >= rollout.engine.max_model_len:
        raise PreflightError(
            f"agent.prompt takes {count} tokens, and agent.max_steps * rollout.max_turn_tokens = {turns}: together "
            "they leave no room for task and results in rollout.engine.max_model_len = "
            f"{rollout.engine.max_model_len}; "
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
    """The configuration but for what a machine has room for, of which no checkpoint knows anything, and for where the
    folder is: a run may be moved."""
    one = {"num_threads": 1}
    learner = config.learner.model_copy(update=one | {"num_workers": 1, "zero_stage": 1})
    engine, prm = config.rollout.engine.model_copy(update=one), config.prm.model_copy(update=one)
    rollout = config.rollout.model_copy(update={"engine": engine, "num_workers": 1, "max_workers": None})
    parts = {"learner": learner, "rollout": rollout, "prm": prm}
    return config.model_copy(update={**parts, "output_dir": "", "name": "", "code_path": None})


def _check_run_folder(config: RunConfig) -> None:
    """Two runs never share a folder; one with a config.json is a run."""
    folder = config.run_path
    if (folder / "config.json").exists():
        check_same_run(config, folder)
    if why := unwritable(folder):
        raise PreflightError(f"run folder '{folder}' is not writable ({why}); set output_dir=... to one that is")


def _check_nothing_collected(config: RunConfig) -> None:
    """A run that trains a PRM collects attempts of its own policy. Raises PreflightError."""
    folder = config.run_path
    if not (folder / "config.json").exists() and any((folder / "collected").glob("shard-*.jsonl")):
        raise PreflightError(
            f"'{folder}/collected' holds trajectories of `agentflow collect`, and this run would learn its PRM from "
            "them in place of its own policy's; choose another name=..., or give a PRM that was trained on them: "
            f"{shlex.quote(f'reward.credit.prm_path={folder}/prm')}"
        )


def _check_own_code(config: RunConfig) -> None:
    """Whether there is what the recipe names, as module:name or command, and can be called. Raises OwnCodeError and
    UserError."""
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
