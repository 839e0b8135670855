"""A frozen transformer with a LoRA adapter, and the hidden states of packed token sequences."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from configs.learner import Attention, ModelConfig
from learner.packing import PackedRow
from learner.tree_attention import interval_mask, padded_ends, plan_attention, register, works
from rollout.chat import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TRAINED, REFERENCE = "default", "reference"
"""The adapters' names in PEFT."""


class Backbone:
    """A causal model of the Llama or Qwen3 family. Only the adapter is trained.

    Mixed precision: frozen base and matrix products in bf16, adapter and its gradients in float32. Without it
    everything is float32. `num_layers` keeps the first so many layers only (None: all). With
    `gradient_checkpointing` the backward pass computes each layer again instead of keeping what it computed: the same
    numbers for a fraction of the memory and about a third more work. `with_reference` gives it a second adapter, which
    is never trained; until it is set it changes nothing, which makes it the untouched base model. `attention`
    says how the prefix tree is read. `base_weights`: the base by transformers' names, on the device and in the base's
    type, which is read where it lies; None loads it from the files. Raises ValueError where they are not this model's.
    """

    def __init__(
        self,
        model_path: Path,
        model: ModelConfig,
        *,
        device: str,
        seed: int,
        mixed_precision: bool,
        num_layers: int | None = None,
        gradient_checkpointing: bool = False,
        with_reference: bool = False,
        attention: Attention = "auto",
        base_weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoTokenizer

        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.base_dtype = torch.bfloat16 if mixed_precision else torch.float32
        self._mixed_precision = mixed_precision
        base = self._load_base(model_path, num_layers, base_weights)
        lora = LoraConfig(
            r=model.lora_rank,
            lora_alpha=model.lora_alpha,  # type: ignore[arg-type]  # PEFT takes a float
            lora_dropout=0.0,
            target_modules=list(model.lora_targets),
            task_type="CAUSAL_LM",
        )
        self.model = get_peft_model(base, lora)
        if with_reference:
            self.model.add_adapter(REFERENCE, lora)
        self.tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.hidden_size = int(base.config.hidden_size)
        self.vocab_size = int(base.config.vocab_size)
        self.head_weight = base.lm_head.weight.detach().to(self.base_dtype)
        self.decoder = base.model
        # Inside of it, for what may stand around it: DeepSpeed switches off an autocast that it finds on.
        self.decoder.forward = self._precision()(base.model.forward)
        self.attention = self._choose(attention, base.config)
        # No dropout anywhere: every pass must give the same numbers, and the engine has none.
        self.model.eval()
        self._recompute = gradient_checkpointing
        if gradient_checkpointing:
            self._checkpoint_layers(base)

    def _load_base(
        self, model_path: Path, num_layers: int | None, weights: Mapping[str, Tensor] | None
    ) -> "PreTrainedModel":
        """On the device; only the first `num_layers` of it, None for all."""
        from transformers import AutoModelForCausalLM

        kind = {"dtype": self.base_dtype, "attn_implementation": register()}
        if weights is None:
            base = AutoModelForCausalLM.from_pretrained(model_path, **kind)
        else:
            base = _built_on(weights, model_path, kind)
        base.config.use_cache = False
        if num_layers is not None:
            base.model.layers = base.model.layers[:num_layers]
        return base.to(self.device)

    def _choose(self, attention: Attention, sizes: "PreTrainedConfig") -> Literal["fused", "blocks"]:
        """`auto` is the fused kernel on a card that can make it."""
        if attention != "auto":
            return attention
        if self.device.type == "cpu":
            return "blocks"
        width = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
        heads, kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
        return "fused" if works(heads, kv_heads, width, self.device) else "blocks"

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def hidden_states(self, row: PackedRow) -> Tensor:
        """The last hidden state `[N, H]` of every node of the prefix tree."""
        num_nodes, ends = len(row.token_ids), row.ends()
        if self.attention == "fused":
            ends = padded_ends(ends)
            plan: dict[str, object] = {"tree_mask": interval_mask(ends, self.device)}
        else:
            plan = {"tree_blocks": plan_attention(ends, self.device), "tree_recompute": self._recompute}
        token_ids, positions = (np.resize(array, len(ends)) for array in (row.token_ids, row.positions))
        output = self.decoder(
            input_ids=self.tensor(token_ids)[None],
            position_ids=self.tensor(positions)[None],
            use_cache=False,
            **plan,
        )
        return output.last_hidden_state[0, :num_nodes]

    def adapter_state(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The trained adapter on the CPU. It is rounded where it lies, so that a card copies the rounded bytes only."""
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self.model)
        return {name: value.to(dtype).contiguous().cpu() for name, value in state.items()}

    def load_adapter_state(self, state: dict[str, Tensor]) -> None:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self.model, state)

    def adapter_parameters(self) -> list[torch.nn.Parameter]:
        """The trained adapter's, and the reference's where there is one."""
        return [parameter for name, parameter in self.model.named_parameters() if ".lora_" in name]

    @torch.no_grad()
    def set_reference(self) -> None:
        """The adapter as it is now becomes the reference."""
        parameters = dict(self.model.named_parameters())
        for name, parameter in parameters.items():
            if f".{REFERENCE}." in name:
                parameter.copy_(parameters[name.replace(f".{REFERENCE}.", f".{TRAINED}.")])

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """The reference in the place of the trained adapter, without gradients."""
        self.model.set_adapter(REFERENCE, inference_mode=True)
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.set_adapter(TRAINED)

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _checkpoint_layers(self, base: "PreTrainedModel") -> None:
        """Each decoder layer keeps its input only. A layer computed again needs the precision of the first time, which
        is over by then."""
        options = {
            "use_reentrant": False,
            "preserve_rng_state": False,
            "context_fn": lambda: (nullcontext(), self._precision()),
        }
        base.gradient_checkpointing_enable(options)
        for layer in base.model.layers:
            # It looks at the layer's own flag; what is inside the layer stays in evaluation, without dropout.
            layer.training = True

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """bf16 matrix products with float32 adapters. PEFT would widen every adapter input to float32 only
        for autocast to narrow it again, so its cast is off."""
        from peft.helpers import disable_input_dtype_casting

        with (
            disable_input_dtype_casting(self.model, active=self._mixed_precision),
            torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._mixed_precision),
        ):
            yield


def _built_on(weights: Mapping[str, Tensor], model_path: Path, kind: Mapping[str, object]) -> "PreTrainedModel":
    """The model with these tensors for its own parameters; nothing is copied."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path), **kind)
    strange = base.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    base.tie_weights()
    empty = [name for name, parameter in base.named_parameters() if parameter.is_meta]
    if strange or empty:
        raise ValueError(
            f"the shared base weights are not those of {model_path}: they lack {empty[:3]} and have {strange[:3]} "
            "besides; set card.share_base=false"
        )
    return base.requires_grad_(False)
