"""Settings of the policy and its update: base model, adapter, loss, optimizer, microbatches, cold start."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.base import Config, Dtype, MayChange, OwnPath, Precision, precision_of, typed
from configs.plugins import ImportPath, own_function


class ModelConfig(Config):
    path: str = "demo"
    """A local folder, a model hub id, or `demo` for the packaged SmolLM2-135M-Instruct."""
    lora_rank: int = Field(default=16, ge=1, le=512)
    """Rank r of the adapter."""
    lora_alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """Adapter scale numerator; the delta of a weight is alpha / r * B A."""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that carry the adapter (Qwen3 and Llama names)."""


Correction = Literal["tis", "icepop", "sequence_reject", "none"]
Band = tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(ge=1, allow_inf_nan=False)]]
"""Lower and upper end of a band of ratios around 1, the ratio of an on-policy token."""
DEFAULT_BAND = (0.5, 5.0)
"""The band of IcePop (arXiv 2510.18855, section 2.3.2)."""


class DapoConfig(Config):
    """Token mean over the whole step, clip-higher (arXiv 2503.14476)."""

    type: Literal["dapo"] = "dapo"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Trust region below 1: a stale token with a lower ratio and a negative advantage has no gradient."""
    clip_high: float = Field(default=0.28, gt=0)
    """Trust region above 1: a stale token with a higher ratio and a positive advantage has no gradient."""


class FlowGrpoConfig(Config):
    """Mean per turn, then per trajectory, with a KL term to the policy that RL starts with (arXiv 2510.05592)."""

    type: Literal["flow_grpo"] = "flow_grpo"
    kl_weight: float = Field(default=0.001, ge=0)
    """Weight of the KL term; 0 computes none."""


class FixedLossConfig(Config):
    """Published losses without settings.

    `grpo`: mean per trajectory, then over trajectories (arXiv 2402.03300). `cispo`: token mean; every token has a
    gradient, with a bounded weight (arXiv 2506.13585). `gspo`: one ratio for a trajectory (arXiv 2507.18071).
    `dr_grpo`: sum per trajectory over a constant (arXiv 2503.20783).
    """

    type: Literal["grpo", "cispo", "gspo", "dr_grpo"] = "grpo"


class CustomLossConfig(Config):
    """A custom function from `learner.losses.LossInputs` to `learner.losses.LossOutput`."""

    type: Literal["custom"] = "custom"
    function: ImportPath
    """`module:name`, also searched in the recipe's folder. It is called as name(inputs, **settings)."""
    settings: dict[str, float | str] = {}
    """More arguments of the function, by name."""
    reference: bool = False
    """Compute the log-probs of the policy that RL starts with, `inputs.ref_logprobs`."""

    def load(self) -> Callable[..., Any]:
        """Return the function. Raises OwnCodeError if it does not take these arguments."""
        return own_function(self.function, key="learner.loss.function", takes="inputs", **self.settings)


LossConfig = Annotated[
    DapoConfig | FlowGrpoConfig | FixedLossConfig | CustomLossConfig,
    Field(discriminator="type"),
    typed("dapo"),
]
BOUNDED_LOSSES = ("cispo", "gspo")
"""Losses that bound the ratio themselves, and so need no correction."""
LOGIT_CHUNK_TOKENS = 128
"""Positions whose logits exist at a time: 78 MB in float32 for 152,000 words. On an H100 1,024 was no faster."""
Attention = Literal["auto", "fused", "blocks"]


class LearnerConfig(Config):
    loss: LossConfig = DapoConfig()
    """Objective of an update."""
    correction: Correction = "tis"
    """Bound on a token's weight, its ratio of learner to sampler: `tis` truncates it; `icepop` drops tokens whose ratio
    is outside of `correction_band`; `sequence_reject` truncates, and drops trajectories outside of the band. `cispo`
    and `gspo` require `none`."""
    correction_band: Band = DEFAULT_BAND
    """Band of a token's ratio under `icepop`, and of the geometric mean of a trajectory's ratios under
    `sequence_reject`, which is close to 1: only a narrow band, such as 0.9 to 1.1, rejects trajectories."""
    overlong: Literal["none", "soft", "filter"] = "none"
    """Effect of long turns. `soft`: DAPO's length penalty. `filter`: trajectories that were cut are left out of the
    loss and the statistics."""
    overlong_cache_tokens: int = Field(default=16, ge=1)
    """Length before the limit over which the penalty of `soft` grows from 0 to -1."""
    guard: bool = True
    """Skip a train step whose batch is too far off-policy. Without the guard only a loss or gradient that is not finite
    skips a step."""
    learning_rate: float = Field(default=3e-4, gt=0, allow_inf_nan=False)
    """AdamW's step size."""
    adam_betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates of the gradient's mean and of its square, in the cold start as well. In a short run a second
    rate of 0.95 to 0.99 forgets the first, large gradients, which otherwise keep later steps small."""
    adam_eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """AdamW's addend to the root of the square's mean."""
    warmup_steps: int = Field(default=0, ge=0)
    """Train steps of linear warm-up."""
    schedule: Literal["constant", "linear"] = "constant"
    """`constant`, or linear from the first train step to zero after the last. The warm-up multiplies both."""
    microbatch_tokens: MayChange[int] = Field(default=1024, ge=64)
    """Most distinct tokens of one forward pass; shared prefixes count once. A longer trajectory has a pass to itself.
    """
    gradient_checkpointing: MayChange[bool] = False
    """Compute each layer again in the backward pass instead of keeping its activations: a fraction of the memory for
    about a third more work. Long trajectories on one card need it."""
    attention: MayChange[Attention] = "auto"
    """Computation of the attention. `fused`: one kernel for the whole microbatch, compiled for the card. `blocks`: 128
    tokens at a time. `auto`: blocks on a CPU; on a card the kernel if it agrees with the blocks."""
    num_threads: MayChange[int] = Field(default=2, ge=1)
    """CPU threads of the learner."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the learner computes, as `rollout.engine.device`."""
    dtype: Dtype = "auto"
    """Type of the frozen base and of matrix products, as `rollout.engine.dtype`. The adapter, its gradients and losses
    are always in float32."""
    num_workers: MayChange[int] = Field(default=1, ge=1)
    """Processes (ranks) that share the microbatches of a train step; on `cuda` each has a card."""
    checkpoint_every: MayChange[int] = Field(default=5, ge=1)
    """Train steps between checkpoints."""
    keep_checkpoints: MayChange[int] = Field(default=2, ge=1)
    """Newest checkpoints that are kept; older ones are deleted."""

    @model_validator(mode="after")
    def _check_attention(self) -> "LearnerConfig":
        if self.attention == "fused" and self.device == "cpu":
            raise ValueError("attention = 'fused' needs device = 'cuda': there is no such kernel for CPUs")
        return self

    @property
    def precision(self) -> Precision:
        """The type that `dtype` selects on this machine."""
        return precision_of(self.dtype, self.device)

    @model_validator(mode="before")
    @classmethod
    def _set_default_correction(cls, values: object) -> object:
        if not isinstance(values, Mapping) or "correction" in values:
            return values
        loss = values.get("loss")
        kind = loss.get("type") if isinstance(loss, Mapping) else getattr(loss, "type", loss)
        return {**values, "correction": "none"} if kind in BOUNDED_LOSSES else values

    @property
    def has_reference(self) -> bool:
        """True if the loss needs log-probs of the policy that RL starts with."""
        if isinstance(self.loss, CustomLossConfig):
            return self.loss.reference
        return isinstance(self.loss, FlowGrpoConfig) and self.loss.kl_weight > 0


class ImitationConfig(Config):
    """Settings of the imitation of any demonstrations."""

    learning_rate: float = Field(default=5e-4, gt=0, allow_inf_nan=False)
    """AdamW's first step size, which falls linearly to zero."""
    num_passes: int = Field(default=1, ge=1)
    """Passes over all demonstrations."""


class PlansConfig(ImitationConfig):
    """Plans of generated tasks, which the built-in planner executes with its tools."""

    type: Literal["plans"] = "plans"
    num_demonstrations: int | None = Field(default=None, ge=0)
    """Scripted demonstrations; 0 skips the phase. None makes 240 if the planner has generated tasks, otherwise 0."""
    lazy_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the demonstrations that give up after the first call or a later one; plans of one call give up before
    it."""


class TeacherConfig(ImitationConfig):
    """Your custom agent works on tasks, and a teacher answers instead of the policy."""

    type: Literal["teacher"] = "teacher"
    function: ImportPath
    """`module:name` of `async def name(task, messages, tools)`, which returns a text or a message of OpenAI's chat
    protocol. A function without `async` is called in a thread."""
    num_demonstrations: int = Field(default=64, ge=1)
    """Tasks with a demonstration; RL uses none of them."""
    min_score: float = Field(default=1.0, ge=0, le=1)
    """Demonstrations with a lower score are left out; 0 keeps all with a score."""


class FileConfig(ImitationConfig):
    """Recorded conversations."""

    type: Literal["file"] = "file"
    path: OwnPath
    """JSON Lines, each with `messages` and, if functions are called, `tools`, in the form of OpenAI's chat protocol.
    Every message of the assistant is imitated, except one with `weight` 0."""


ColdStartConfig = Annotated[
    PlansConfig | TeacherConfig | FileConfig,
    Field(discriminator="type"),
    typed("plans", function="teacher", path="file"),
]
