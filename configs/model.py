"""The policy: which base model, and the shape of its LoRA adapter."""

from pydantic import Field

from configs.base import Config


class ModelConfig(Config):
    path: str = "demo"
    """A local folder, a model hub id, or `demo` for the packaged SmolLM2-135M-Instruct."""
    lora_rank: int = Field(default=16, ge=1, le=512)
    """Rank r of the adapter."""
    lora_alpha: float = Field(default=32.0, gt=0)
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
