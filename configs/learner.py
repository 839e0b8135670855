"""The policy and its update: base model, adapter, objective, optimizer, microbatches, the supervised cold start."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.base import Config, Dtype, OwnPath, Precision, precision_of, typed
from configs.plugins import ImportPath, own_function


class ModelConfig(Config):
    path: str = "demo"
    """A local folder, a model hub id, or `demo` for the packaged SmolLM2-135M-Instruct."""
    lora_rank: int = Field(default=16, ge=1, le=512)
    """Rank r of the adapter."""
    lora_alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """Adapter scale numerator; the delta of a weight is alpha / r * B A."""
    lora_targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Linear layers that carry the adapter (Qwen3 and Llama names)."""


class TisConfig(Config):
    """A token weighs the ratio of the learner's probability to the sampler's, truncated above (truncated importance
    sampling)."""

    type: Literal["tis"] = "tis"
    max_weight: float = Field(default=2.0, ge=1)
    """Largest weight of a token; 1 is the weight of an on-policy token."""


class IcepopConfig(Config):
    """The ratio inside a band, 0 outside (arXiv 2510.18855, section 2.3.2)."""

    type: Literal["icepop"] = "icepop"
    low: float = Field(default=0.5, gt=0, le=1)
    """Lower end of the band of a token's ratio."""
    high: float = Field(default=5.0, ge=1)
    """Upper end of that band."""


class SequenceRejectConfig(Config):
    """As `tis`, and a trajectory whose mean ratio is outside a band trains nothing."""

    type: Literal["sequence_reject"] = "sequence_reject"
    max_weight: float = Field(default=2.0, ge=1)
    """Largest weight of a token of a trajectory that is kept."""
    low: float = Field(default=0.5, gt=0, le=1)
    """Lower end of the band of the geometric mean of a trajectory's ratios. The mean is close to 1: a narrower band,
    such as 0.9 to 1.1, is the one that rejects."""
    high: float = Field(default=5.0, ge=1)
    """Upper end of that band."""


class NoCorrectionConfig(Config):
    """The ratio itself, as in PPO."""

    type: Literal["none"] = "none"


CorrectionConfig = Annotated[
    TisConfig | IcepopConfig | SequenceRejectConfig | NoCorrectionConfig, Field(discriminator="type"), typed("tis")
]


class DapoConfig(Config):
    """Token mean over the whole step, clip-higher (arXiv 2503.14476)."""

    type: Literal["dapo"] = "dapo"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far below 1 the ratio of a stale token may fall before a negative advantage stops pushing it."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far above 1 the ratio of a stale token may rise before a positive advantage stops pushing it."""


class GrpoConfig(Config):
    """Mean per trajectory first, without a KL term (arXiv 2402.03300)."""

    type: Literal["grpo"] = "grpo"
    clip: float = Field(default=0.2, gt=0, lt=1)
    """How far from 1 the ratio of a stale token may be, on either side, before its advantage stops pushing it on."""


class FlowGrpoConfig(Config):
    """Mean per turn, then per trajectory, with a KL term to the policy that RL starts with (arXiv 2510.05592)."""

    type: Literal["flow_grpo"] = "flow_grpo"
    clip: float = Field(default=0.2, gt=0, lt=1)
    """How far from 1 the ratio of a stale token may be, on either side, before its advantage stops pushing it on."""
    kl_weight: float = Field(default=0.001, ge=0)
    """Weight of the KL term; 0 computes none."""


class CispoConfig(Config):
    """Token mean over the whole step; a token weighs its ratio, bounded above, and none is clipped out of the gradient
    (MiniMax-M1, arXiv 2506.13585)."""

    type: Literal["cispo"] = "cispo"
    max_weight: float = Field(default=5.0, ge=1)
    """Largest weight of a token, the paper's 1 + eps_high; there is no smallest one."""


class GspoConfig(Config):
    """Mean per trajectory first; all tokens of a trajectory weigh, and are clipped by, the geometric mean of their
    ratios (arXiv 2507.18071)."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """How far below 1 a stale trajectory's mean ratio may fall before negative advantages stop pushing it."""
    clip_high: float = Field(default=4e-4, gt=0)
    """How far above 1 it may rise before positive advantages stop pushing it."""


class DrGrpoConfig(Config):
    """Sum per trajectory over a constant, with advantages that no deviation divides (arXiv 2503.20783)."""

    type: Literal["dr_grpo"] = "dr_grpo"
    clip: float = Field(default=0.2, gt=0, lt=1)
    """How far from 1 the ratio of a stale token may be, on either side, before its advantage stops pushing it on."""
    length: int = Field(default=512, ge=1)
    """The constant that every trajectory's sum is divided by, whatever its length; the paper's is the budget of tokens.
    """


class CustomLossConfig(Config):
    """A function of one's own from `learner.losses.LossInputs` to `learner.losses.LossOutput`."""

    type: Literal["custom"] = "custom"
    function: ImportPath
    """`module:name`, looked for in the recipe's folder too; it is called as name(inputs, **settings)."""
    settings: dict[str, float | str] = {}
    """Further arguments of the function, by name."""
    reference: bool = False
    """Compute the log-probs of the policy that RL starts with, `inputs.ref_logprobs`."""

    def load(self) -> Callable[..., Any]:
        """The function. Raises OwnCodeError where it cannot be called so."""
        return own_function(self.function, key="learner.loss.function", takes="inputs", **self.settings)


LossConfig = Annotated[
    DapoConfig | GrpoConfig | FlowGrpoConfig | CispoConfig | GspoConfig | DrGrpoConfig | CustomLossConfig,
    Field(discriminator="type"),
    typed("dapo"),
]


BOUNDED_LOSSES = ("cispo", "gspo")
"""Losses that weigh a token by a bounded ratio of their own, in place of a correction."""


class NoOverlongConfig(Config):
    """Length changes nothing."""

    type: Literal["none"] = "none"


class SoftOverlongConfig(Config):
    """DAPO's length penalty."""

    type: Literal["soft"] = "soft"
    cache_tokens: int = Field(default=16, ge=1)
    """Length before the limit over which the penalty grows from 0 to -1."""


class FilterOverlongConfig(Config):
    """Cut trajectories leave the loss and the statistics."""

    type: Literal["filter"] = "filter"


OverlongConfig = Annotated[
    NoOverlongConfig | SoftOverlongConfig | FilterOverlongConfig, Field(discriminator="type"), typed("none")
]


class GuardConfig(Config):
    min_effective_sample_share: float = Field(default=0.3, ge=0, le=1)
    """A train step is skipped when the ratios leave a smaller share of its choice tokens as effective sample: learner
    and sampler are too far apart, or a few tokens decide. 0 lets every step pass."""
    max_mismatch_k3_age0: float = Field(default=0.05, gt=0)
    """A train step is skipped when engine and learner differ by more on choice tokens of the very weights that are
    updated (mean k3 per token): staleness cannot explain that, the engine serves other weights or computes wrongly."""
    max_mismatch_k3_stale: float = Field(default=1.0, gt=0)
    """A train step is skipped when engine and learner differ by more on choice tokens of older weights."""


Attention = Literal["auto", "fused", "blocks"]


class LearnerConfig(Config):
    loss: LossConfig = DapoConfig()
    """What an update makes smaller."""
    correction: CorrectionConfig = TisConfig()
    """What a token that other weights sampled weighs; `none`, and only that, with a loss that bounds the ratio itself:
    `cispo` and `gspo`."""
    overlong: OverlongConfig = NoOverlongConfig()
    """What the length of a trajectory's turns changes in its reward."""
    guard: GuardConfig = GuardConfig()
    learning_rate: float = Field(default=3e-4, gt=0, allow_inf_nan=False)
    """AdamW's step size."""
    warmup_steps: int = Field(default=0, ge=0)
    """Train steps of linear warm-up."""
    schedule: Literal["constant", "linear"] = "constant"
    """`constant`, or falling in a straight line from the first train step to zero after the last. The warm-up
    multiplies either."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """AdamW's decay of the adapter's weights."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm beyond which the gradient is scaled down."""
    microbatch_tokens: int = Field(default=1024, ge=64)
    """Most distinct tokens of one forward pass; shared prefixes count once. A longer trajectory goes alone."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it computed: a fraction of the memory for
    about a third more work. What long trajectories on one card need."""
    logit_chunk_tokens: int = Field(default=128, ge=1)
    """Positions whose logits (one number per word of the vocabulary each) exist at a time."""
    attention: Attention = "auto"
    """How a token reads those before it. `fused`: one kernel for the whole microbatch, compiled for the card. `blocks`:
    128 tokens at a time. `auto`: on a CPU blocks, on a card the kernel if its compiler makes one that agrees with
    them."""
    num_threads: int = Field(default=2, ge=1)
    """CPU threads of the learner."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the learner computes; `cuda` needs a GPU and the `gpu` extra."""
    dtype: Dtype = "auto"
    """Frozen base and matrix products of the learner, as `rollout.engine.dtype`; adapter, its gradients and losses are
    in float32 always."""
    num_workers: int = Field(default=1, ge=1)
    """Processes (ranks) that share out the microbatches of a train step; on `cuda` each has a card."""
    zero_stage: Literal[1, 2, 3] = 1
    """What the ranks share out besides (DeepSpeed ZeRO). 1: the optimizer's moments. 2: the adapter's gradients too,
    which are as small. 3: all weights, the frozen base too, which are gathered layer by layer in every pass. Each
    rank loads the whole base first, so it must fit on one card; then there is more room for activations. Without effect
    where num_workers is 1."""
    checkpoint_every: int = Field(default=5, ge=1)
    """Train steps between checkpoints."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the newest are kept; older ones are deleted."""

    @model_validator(mode="after")
    def _a_kernel_needs_a_card(self) -> "LearnerConfig":
        if self.attention == "fused" and self.device == "cpu":
            raise ValueError("attention = 'fused' needs device = 'cuda': a CPU has no such kernel with gradients")
        return self

    @property
    def precision(self) -> Precision:
        """What `dtype` means on this machine."""
        return precision_of(self.dtype, self.device)

    @model_validator(mode="before")
    @classmethod
    def _no_second_bound(cls, values: Any) -> Any:
        """The default correction gives way to a loss that bounds the ratio itself."""
        if not isinstance(values, Mapping) or "correction" in values:
            return values
        loss = values.get("loss")
        kind = loss.get("type") if isinstance(loss, Mapping) else getattr(loss, "type", loss)
        return {**values, "correction": "none"} if kind in BOUNDED_LOSSES else values

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with the policy that RL starts with."""
        if isinstance(self.loss, CustomLossConfig):
            return self.loss.reference
        return isinstance(self.loss, FlowGrpoConfig) and self.loss.kl_weight > 0


class ImitationConfig(Config):
    """How demonstrations are imitated, wherever they are from."""

    batch_demonstrations: int = Field(default=8, ge=1)
    """Demonstrations per optimizer step."""
    learning_rate: float = Field(default=5e-4, gt=0, allow_inf_nan=False)
    """AdamW's first step size; it falls linearly to zero."""


class PlansConfig(ImitationConfig):
    """The plans of generated tasks, played by the built-in planner through its tools; every one is used once."""

    type: Literal["plans"] = "plans"
    num_demonstrations: int = Field(default=240, ge=0)
    """Scripted demonstrations; 0 skips the phase."""
    wrong_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the demonstrations that are wrong on purpose, so that RL has something to improve."""


class OwnDemonstrationsConfig(ImitationConfig):
    """Demonstrations of an agent of one's own."""

    num_passes: int = Field(default=1, ge=1)
    """How often each demonstration is imitated."""


class TeacherConfig(OwnDemonstrationsConfig):
    """Your own agent plays tasks, and a teacher answers in the policy's place."""

    type: Literal["teacher"] = "teacher"
    function: ImportPath
    """`module:name` of `async def name(task, messages, tools)`, which returns a text or a message of OpenAI's chat
    protocol. It may ask another model. A plain function is called in a thread."""
    num_demonstrations: int = Field(default=64, ge=1)
    """Tasks that are played; RL never asks one of them."""
    min_score: float = Field(default=1.0, ge=0, le=1)
    """Demonstrations with a lower score are left out; 0 keeps all that have one."""


class FileConfig(OwnDemonstrationsConfig):
    """Recorded conversations."""

    type: Literal["file"] = "file"
    path: OwnPath
    """JSON Lines, each with `messages` and, where functions were called, `tools`, as OpenAI's chat protocol has them.
    Every message of the assistant is imitated, but for one with `weight` 0."""


ColdStartConfig = Annotated[
    PlansConfig | TeacherConfig | FileConfig,
    Field(discriminator="type"),
    typed("plans", function="teacher", path="file"),
]
