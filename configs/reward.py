"""Judging: how steps are credited, the process reward model (PRM), its data and its training, and language models that
judge steps and answers."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from configs.api_keys import PlainUrl, in_clear_text, on_this_machine
from configs.base import Config, OwnPath, typed
from configs.plugins import ImportPath


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


class JudgeConfig(Config):
    base_url: PlainUrl = "http://127.0.0.1:11434/v1"
    """Root of a server that speaks the OpenAI chat-completions protocol; the default is a local Ollama."""
    model: str = Field(min_length=1, max_length=200)
    """The server's name of the judging model."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the API key. None sends no key: a local server needs none, and a key
    leaves this machine only for a server that the configuration names it for."""
    temperature: float = Field(default=0.7, ge=0, le=2)
    """Sampling temperature; several votes need one above 0, or they would be copies of one another."""
    num_votes: int = Field(default=3, ge=1, le=9)
    """Blind verdicts per step or answer, an odd number: their median or majority counts."""
    request_timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """Wall-clock limit of one request."""
    max_retries: int = Field(default=4, ge=0, le=10)
    """Further attempts after a passing failure, and further replies after one without a verdict."""
    requests_per_minute: float = Field(default=60.0, gt=0, le=1_000_000)
    """Requests are started no faster than this."""
    max_concurrency: int = Field(default=4, ge=1, le=256)
    """Requests under way at a time."""
    price_per_million_input_tokens: float = Field(default=0.0, ge=0, le=10_000)
    """US dollars; 0 for a local server."""
    price_per_million_output_tokens: float = Field(default=0.0, ge=0, le=10_000)
    """US dollars; 0 for a local server."""
    max_cost_usd: float = Field(default=1.0, ge=0, le=100_000)
    """Judging stops before the request that could exceed this, earlier runs on the same receipts included; before it is
    sent, a prompt counts as a token for each four characters."""
    max_output_tokens: int = Field(default=1024, ge=16, le=32_768)
    """Longest reply, a reasoning model's thoughts included."""

    @field_validator("num_votes")
    @classmethod
    def _odd_votes(cls, num_votes: int) -> int:
        if num_votes % 2 == 0:
            raise ValueError(f"num_votes must be odd, so that the median is a verdict, got {num_votes}")
        return num_votes

    @model_validator(mode="after")
    def _votes_differ(self) -> Self:
        if self.num_votes > 1 and self.temperature == 0:
            raise ValueError(f"{self.num_votes} votes at temperature 0 are copies: raise temperature or ask for 1 vote")
        return self

    @model_validator(mode="after")
    def _key_and_money_are_safe(self) -> Self:
        if self.api_key_env is None or on_this_machine(self.base_url):
            return self
        if in_clear_text(self.base_url):
            raise ValueError(f"base_url {self.base_url} would send the key in clear text: use https")
        if not (self.price_per_million_input_tokens and self.price_per_million_output_tokens):
            raise ValueError(
                "a remote server with a key bills its tokens: set both prices, or max_cost_usd sees nothing"
            )
        return self


class StepJudgeConfig(JudgeConfig):
    max_spread: float = Field(default=0.4, ge=0, le=1)
    """Votes that lie further apart than this disagree, and the step gets no label."""


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
    """Tokens of one step's text; older context is cut, then the middle of the question, never the decision."""
    held_out_share: float = Field(default=0.25, gt=0, lt=1)
    """Share of the tasks whose steps the PRM never sees in training."""
    junk_share: float = Field(default=0.5, ge=0, le=1)
    """Worthless decisions with label 0 added to the training steps, as a share of them."""
    spoilt_share: float = Field(default=0.5, ge=0, le=2)
    """Copies of right steps, thoughts left out, with one digit or word changed and label 0, as a share of these."""
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
