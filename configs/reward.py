"""Settings of credit, of the process reward model (PRM), its data and training, and of language models as judges."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.api_keys import PlainUrl, on_this_machine
from configs.base import Config, MayChange, OwnPath, typed
from configs.plugins import ImportPath
from configs.rollout import ServerConfig


class CollectConfig(Config):
    num_tasks: int = Field(default=918, ge=2)
    """Tasks that trajectories are collected for."""
    rollouts_per_task: int = Field(default=4, ge=1)
    """Trajectories per task, besides the teacher's."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature; a PRM learns from right and wrong steps, so it may be above training's."""


class JudgeConfig(ServerConfig):
    base_url: PlainUrl = "http://127.0.0.1:11434/v1"
    """Root of a server with OpenAI's chat completions; the default is a local Ollama."""
    num_votes: Literal[1, 3, 5, 7, 9] = 3
    """Verdicts per step or answer: their median or majority counts."""
    max_concurrency: MayChange[int] = Field(default=4, ge=1, le=256)
    """Requests that are open at a time."""
    max_retries: int = Field(default=4, ge=0, le=10)
    """Further attempts after a transient failure, and further replies after one without a verdict."""
    price_per_million_input_tokens: float = Field(default=0.0, ge=0, le=10_000)
    """US dollars; 0 for a local server."""
    price_per_million_output_tokens: float = Field(default=0.0, ge=0, le=10_000)
    """US dollars; 0 for a local server."""
    max_cost_usd: MayChange[float] = Field(default=1.0, ge=0, le=100_000)
    """Budget, including earlier runs with the same receipts: judging stops before the request that could exceed it. The
    tokens of a prompt are estimated at one per four characters."""
    max_output_tokens: int = Field(default=1024, ge=16, le=32_768)
    """Longest reply, including the thoughts of a reasoning model."""

    @property
    def temperature(self) -> float:
        """Return the sampling temperature: several votes at 0 would be copies."""
        return 0.7 if self.num_votes > 1 else 0.0

    @model_validator(mode="after")
    def _remote_server_has_prices(self) -> Self:
        bills = self.api_key_env is not None and not on_this_machine(self.base_url)
        if bills and not (self.price_per_million_input_tokens and self.price_per_million_output_tokens):
            raise ValueError("a remote server with a key bills its tokens: set both prices for max_cost_usd to count")
        return self


class PlanLabelConfig(Config):
    """The plan of the task generator: no key, generated tasks and the planner only."""

    type: Literal["plan"] = "plan"


class MonteCarloLabelConfig(Config):
    """The share of continuations after the step that end right: no key, any agent."""

    type: Literal["monte_carlo"] = "monte_carlo"
    continuations: int = Field(default=4, ge=1, le=64)
    """Continuations per step (K)."""


class JudgeLabelConfig(Config):
    """A language model over the OpenAI chat protocol, for any agent."""

    type: Literal["judge"] = "judge"
    judge: JudgeConfig


LabelConfig = Annotated[
    PlanLabelConfig | MonteCarloLabelConfig | JudgeLabelConfig, Field(discriminator="type"), typed("plan")
]


class PrmConfig(Config):
    model_path: str = "Qwen/Qwen3-0.6B"
    """Base of the PRM: a folder, a model hub id, or `demo`."""
    num_layers: int | None = Field(default=None, ge=1)
    """Number of layers of the base to keep, from the first, for speed on a CPU; None keeps all."""
    lora_rank: int = Field(default=16, ge=1, le=512)
    """Rank r of the PRM's adapter."""
    max_tokens: int = Field(default=1024, ge=32)
    """Tokens of one step's text; older context is cut, then the middle of the question, never the decision."""
    num_epochs: int = Field(default=3, ge=1)
    """Passes over the training steps."""
    learning_rate: float = Field(default=2e-4, gt=0, allow_inf_nan=False)
    """AdamW's step size for the adapter; the head's is ten times that. It falls linearly to zero."""
    microbatch_tokens: MayChange[int] = Field(default=2048, ge=64)
    """Most distinct tokens of one forward pass; shared prefixes count once."""
    gradient_checkpointing: MayChange[bool] = False
    """Save memory, as `learner.gradient_checkpointing`."""
    num_threads: MayChange[int] = Field(default=2, ge=1)
    """CPU threads of the PRM."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the PRM computes, as `rollout.engine.device`."""


class OutcomeConfig(Config):
    """The outcome minus the group's mean, divided by the group's deviation unless centered (Dr. GRPO)."""

    type: Literal["outcome", "outcome_centered"] = "outcome"


class StepScoresConfig(Config):
    """Scores of steps, by a process reward model or a custom function."""

    prm_path: OwnPath | None = None
    """Folder of a trained PRM; None trains one at the start of the run."""
    turn_scorer: ImportPath | None = None
    """`module:name` of a custom function that scores turns instead of a PRM: name(task, answer, turns) returns a list
    with a number from 0 to 1, or None, for each turn."""

    @model_validator(mode="after")
    def _has_one_source_of_scores(self) -> "StepScoresConfig":
        if self.turn_scorer and self.prm_path:
            raise ValueError("turn_scorer scores turns instead of a PRM: leave out prm_path or turn_scorer")
        return self


class OutcomeGuidedConfig(StepScoresConfig):
    """The outcome. If all attempts at a task are wrong, step scores choose the decisions of further ones."""

    type: Literal["outcome_guided"] = "outcome_guided"
    attempts: int = Field(default=2, ge=1, le=64)
    """Guided attempts for a group without a right one. Those that are right take the places of wrong ones."""
    candidates: int = Field(default=64, ge=2, le=256)
    """Most samples of one decision, drawn in rounds until one is good enough."""


class ProcessConfig(StepScoresConfig):
    """Step scores alone, without references: an attempt's lowest score, less the group's mean."""

    type: Literal["process"] = "process"


_GUIDED = dict.fromkeys(("prm_path", "turn_scorer", "attempts", "candidates"), "outcome_guided")
CreditConfig = Annotated[
    OutcomeConfig | OutcomeGuidedConfig | ProcessConfig, Field(discriminator="type"), typed("outcome", **_GUIDED)
]
Credit = Literal["outcome", "outcome_centered", "outcome_guided", "process"]


class RewardConfig(Config):
    credit: CreditConfig = OutcomeConfig()
    """Credit of the steps of a trajectory."""
    scorer: ImportPath | None = None
    """`module:name` of a custom function that scores answers, for all tasks that name no scorer themselves. It is
    called as name(task, answer) or name(task, answer, turns). None uses the data set's comparison."""
    timeout_s: MayChange[float] = Field(default=10.0, gt=0, le=3600)
    """Wall-clock limit of one call of a custom scorer; beyond it the attempt is unscored."""

    @property
    def step_scores(self) -> StepScoresConfig | None:
        """The settings of step scores, from a PRM or a custom function; None if there are none."""
        return self.credit if isinstance(self.credit, StepScoresConfig) else None

    @property
    def prm(self) -> StepScoresConfig | None:
        """The settings of the PRM that scores steps in training; None without a PRM."""
        return None if self.turn_scorer else self.step_scores

    @property
    def turn_scorer(self) -> str | None:
        return self.step_scores.turn_scorer if self.step_scores else None

    @property
    def prm_path(self) -> str | None:
        return self.prm.prm_path if self.prm else None
