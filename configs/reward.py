"""Judging: how steps are credited, the process reward model (PRM), its data and its training."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.base import Config, OwnPath, typed
from configs.judge import StepJudgeConfig
from configs.own import ImportPath


class CollectConfig(Config):
    num_tasks: int = Field(default=918, ge=2)
    """Tasks that trajectories are collected for; the PRM is split by task, so at least two."""
    rollouts_per_task: int = Field(default=4, ge=1)
    """Trajectories per task."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature; a PRM learns from right and wrong steps, so it may be above training's."""
    aime_test_path: OwnPath | None = None
    """File of the AIME problems of the evaluation, which no collected problem may leak; none takes those in
    envs.data_path, or the public data set."""


class PlanLabelConfig(Config):
    """The generator's own plan: no key, generated tasks and the planner only."""

    type: Literal["plan"] = "plan"


class MonteCarloLabelConfig(Config):
    """The share of continuations from the step that end right: no key, whatever the agent."""

    type: Literal["monte_carlo"] = "monte_carlo"
    continuations: int = Field(default=4, ge=1, le=64)
    """Continuations per step (K)."""


class JudgeLabelConfig(Config):
    """A language model over the OpenAI chat protocol, for the planner's steps."""

    type: Literal["judge"] = "judge"
    judge: StepJudgeConfig


LabelConfig = Annotated[
    PlanLabelConfig | MonteCarloLabelConfig | JudgeLabelConfig, Field(discriminator="type"), typed("plan")
]


class PrmConfig(Config):
    model_path: str = "Qwen/Qwen3-0.6B"
    """Base of the PRM: a folder, a model hub id, or `demo`."""
    num_layers: int | None = Field(default=None, ge=1)
    """Keep only the first so many layers of the base, for speed on a CPU; none keeps all."""
    lora_rank: int = Field(default=16, ge=1, le=512)
    """Rank r of the PRM's adapter."""
    lora_alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """Its scale's numerator; the delta of a weight is alpha / r * B A."""
    max_tokens: int = Field(default=1024, ge=32)
    """Tokens of one step's text; older context is cut, never the decision."""
    held_out_share: float = Field(default=0.25, gt=0, lt=1)
    """Share of the tasks whose steps the PRM never sees in training."""
    junk_share: float = Field(default=0.5, ge=0, le=1)
    """Worthless decisions with label 0 added to the training steps, as a share of them."""
    spoilt_share: float = Field(default=0.5, ge=0, le=2)
    """Copies of right steps with one digit or word changed and label 0, as a share of the right steps."""
    num_epochs: int = Field(default=3, ge=1)
    """Times that every training step is gone through."""
    batch_tasks: int = Field(default=4, ge=1)
    """Tasks whose steps make one optimizer step."""
    learning_rate: float = Field(default=2e-4, gt=0, allow_inf_nan=False)
    """AdamW's step size for the adapter; the head's is ten times that. It falls linearly to zero."""
    microbatch_tokens: int = Field(default=2048, ge=64)
    """Most distinct tokens of one forward pass; shared prefixes count once."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it computed, for less memory."""
    num_threads: int = Field(default=2, ge=1)
    """CPU threads of the PRM."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the PRM computes; `cuda` needs a GPU and the `gpu` extra."""


class AlarmConfig(Config):
    """When a step-level reward is taken to be hacked; every alarm multiplies the PRM's weight by `factor`, and quiet
    steps bring it back."""

    window: int = Field(default=4, ge=2)
    """Train steps over which every sign is judged."""
    factor: float = Field(default=0.5, ge=0, lt=1)
    """What one alarm leaves of the PRM's weight; 0 switches the PRM off for good."""
    solve_rate_fall: float = Field(default=0.15, gt=0, le=1)
    """Fall of the solve rate below its best window that is an alarm, where it is more than noise."""
    ranking_deviations: float = Field(default=3.0, gt=0)
    """Standard deviations below chance at which the PRM ranks attempts against siblings with worse outcomes."""
    canary: float = Field(default=0.3, gt=0, le=1)
    """Highest score a junk decision may get."""
    rejudge_mse: float = Field(default=0.2, gt=0)
    """Mean squared error of the PRM on fresh rollouts, against the generator's plan where a task has one."""


class OutcomeConfig(Config):
    """A step is credited with its trajectory's outcome alone; no PRM is asked."""

    type: Literal["outcome"] = "outcome"


class OutcomeCenteredConfig(Config):
    """The outcome minus the group's mean, not divided by its deviation (Dr. GRPO); no PRM is asked."""

    type: Literal["outcome_centered"] = "outcome_centered"


class OutcomeGatedConfig(Config):
    """The outcome and the step's PRM score, in groups whose outcomes differ; without a PRM it is `outcome`."""

    type: Literal["outcome_gated"] = "outcome_gated"
    prm_path: OwnPath | None = None
    """A trained PRM's folder; without one the run trains its own first."""
    turn_scorer: ImportPath | None = None
    """`module:name` of a function of one's own that scores turns in a PRM's place: name(task, answer, turns) returns a
    list with a number from 0 to 1 for each of them, or None. None: a PRM does."""
    prm_weight: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    """Weight of the step scores; alarms lower it, and it never rises above this."""
    alarms: AlarmConfig = AlarmConfig()

    @model_validator(mode="after")
    def _scores_come_from_one_place(self) -> "OutcomeGatedConfig":
        if self.turn_scorer and self.prm_path:
            raise ValueError("turn_scorer scores turns in a PRM's place: leave prm_path out, or turn_scorer")
        return self


CreditConfig = Annotated[
    OutcomeConfig | OutcomeCenteredConfig | OutcomeGatedConfig, Field(discriminator="type"), typed("outcome_gated")
]
Credit = Literal["outcome", "outcome_centered", "outcome_gated"]


class RewardConfig(Config):
    credit: CreditConfig = OutcomeGatedConfig()
    """What a step is credited with."""
    scorer: ImportPath | None = None
    """`module:name` of a function of one's own that says how good an answer is, for all tasks that name no scorer
    themselves; it is called as name(task, answer) or name(task, answer, turns). None: the data set's comparison."""
    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Wall-clock limit of one call of a scorer of one's own; beyond it the run ends."""

    @property
    def gated(self) -> OutcomeGatedConfig | None:
        """What the recipe says of step scores, whoever gives them; None where there are none."""
        return self.credit if isinstance(self.credit, OutcomeGatedConfig) else None

    @property
    def prm(self) -> OutcomeGatedConfig | None:
        """What the recipe says of the PRM that scores steps in training; None where none is asked."""
        return None if self.turn_scorer else self.gated

    @property
    def turn_scorer(self) -> str | None:
        return self.gated.turn_scorer if self.gated else None

    @property
    def prm_path(self) -> str | None:
        return self.prm.prm_path if self.prm else None
