"""A frozen transformer with a LoRA adapter, and the hidden states of packed token sequences."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from configs.errors import UserError
from configs.learner import Attention, ModelConfig
from learner.layers import fuse
from learner.packing import PackedRow
from learner.tree_attention import interval_mask, padded_ends, plan_attention, register, works
from rollout.chat import Tokenizer
from rollout.model_files import check_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TRAINED, REFERENCE = "default", "reference"
"""Names of the adapters in PEFT."""


class Backbone:
    """A causal model of the Llama or Qwen3 family with a trained adapter."""

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
        """Load the base model, or its first `num_layers`, and create the adapter, whose initial weights `seed` decides.

        With `mixed_precision` the frozen base and matrix products are in bf16; the adapter and its gradients are in
        float32 always. With `gradient_checkpointing` the backward pass computes each layer again: the same numbers, for
        a fraction of the memory and about a third more work. The reference is a second adapter, which is never trained
        and changes nothing before `set_reference`. `base_weights` by transformers' names, on the device and in the
        base's type, are used in place of the files. Raises ValueError if they do not fit the model.
        """
        from peft import LoraConfig, get_peft_model
        from transformers import AutoTokenizer

        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.base_dtype = torch.bfloat16 if mixed_precision else torch.float32
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
        fuse(self.model)
        self.attention = self._choose(attention, base.config)
        # Without dropout, as in the engine: every pass must give the same numbers.
        self.model.eval()
        self._recompute = gradient_checkpointing
        if gradient_checkpointing:
            self._checkpoint_layers(base)

    def _load_base(
        self, model_path: Path, num_layers: int | None, weights: Mapping[str, Tensor] | None
    ) -> "PreTrainedModel":
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM

        kind = {"dtype": self.base_dtype, "attn_implementation": register()}
        if weights is None:
            check_weights(model_path)
            base = AutoModelForCausalLM.from_pretrained(model_path, **kind)
        else:
            with init_empty_weights(include_buffers=False):
                base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path), **kind)
            unknown = base.load_state_dict(weights, strict=False, assign=True).unexpected_keys
            base.tie_weights()
            empty = [name for name, parameter in base.named_parameters() if parameter.is_meta]
            if unknown or empty:
                raise ValueError(
                    f"the shared base weights lack {empty[:3]} of {model_path}, which lacks {unknown[:3]}; "
                    "set card.share_base=false"
                )
            base.requires_grad_(False)
        base.config.use_cache = False
        if num_layers is not None:
            base.model.layers = base.model.layers[:num_layers]
        return base.to(self.device)

    def _choose(self, attention: Attention, sizes: "PreTrainedConfig") -> Literal["fused", "blocks"]:
        if attention != "auto":
            return attention
        heads, kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
        width = getattr(sizes, "head_dim", None) or sizes.hidden_size // heads
        on_card = self.device.type != "cpu"
        return "fused" if on_card and works(heads, kv_heads, width, self.device) else "blocks"

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def hidden_states(self, row: PackedRow) -> Tensor:
        """Return the last hidden state `[N, H]` of every node of the prefix tree."""
        num_nodes, ends = len(row.token_ids), row.ends()
        if self.attention == "fused":
            ends = padded_ends(ends)
            plan: dict[str, object] = {"tree_mask": interval_mask(ends, self.device)}
        else:
            plan = {"tree_blocks": plan_attention(ends, self.device), "tree_recompute": self._recompute}
        token_ids, positions = (np.resize(array, len(ends)) for array in (row.token_ids, row.positions))
        output = self.decoder(
            input_ids=self.tensor(token_ids)[None], position_ids=self.tensor(positions)[None], use_cache=False, **plan
        )
        return output.last_hidden_state[0, :num_nodes]

    def adapter_state(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return the trained adapter on the CPU. Rounding on its device makes the copy smaller."""
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self.model)
        return {name: value.to(dtype).contiguous().cpu() for name, value in state.items()}

    def load_adapter_state(self, state: dict[str, Tensor]) -> None:
        """Replace the trained adapter. Raises UserError unless `state` has exactly its tensors."""
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        # PEFT ignores tensors that are missing, and those that the model lacks.
        own, given = (
            {(name, *tensor.shape) for name, tensor in tensors.items()}
            for tensors in (get_peft_model_state_dict(self.model), state)
        )
        if wrong := own ^ given:
            raise UserError(
                f"adapter and model differ in the tensor or the shape of {min(wrong)[0]}; use the base model, "
                "lora_rank and lora_targets with which the adapter was trained"
            )
        set_peft_model_state_dict(self.model, state)

    @torch.no_grad()
    def set_reference(self) -> None:
        parameters = dict(self.model.named_parameters())
        for name, parameter in parameters.items():
            if f".{REFERENCE}." in name:
                parameter.copy_(parameters[name.replace(f".{REFERENCE}.", f".{TRAINED}.")])

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """A context with the reference instead of the trained adapter, without gradients."""
        self.model.set_adapter(REFERENCE, inference_mode=True)
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.set_adapter(TRAINED)

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _checkpoint_layers(self, base: "PreTrainedModel") -> None:
        base.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        for layer in base.model.layers:
            # The flag of the layer alone. Its submodules stay in evaluation mode, without dropout.
            layer.training = True
