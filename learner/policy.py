"""The policy in training: base model plus LoRA adapter, and its log-probs of packed samples."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.model import ModelConfig
from learner.grammar import GrammarMasks
from learner.logprobs import Constrain, token_logprobs
from learner.packing import PackedRow, pack
from learner.tree_attention import plan_attention, register
from learner.types import TrainingSample


class Policy:
    """A causal model of the Llama or Qwen3 family with a LoRA adapter in float32.

    Mixed precision: frozen base and matrix products in bf16, adapter, softmax and gradients of the adapter in
    float32. Without it everything is float32.
    """

    def __init__(
        self, model_path: Path, config: ModelConfig, *, device: str, seed: int, mixed_precision: bool = True
    ) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(seed)
        self.device = torch.device(device)
        self._mixed_precision = mixed_precision
        base_dtype = torch.bfloat16 if mixed_precision else torch.float32
        base: Any = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=base_dtype,
            attn_implementation=register(),
        )
        base.to(self.device)
        base.config.use_cache = False
        lora = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # PEFT takes a float
            lora_dropout=0.0,
            target_modules=list(config.lora_targets),
            task_type="CAUSAL_LM",
        )
        self.model: Any = get_peft_model(base, lora)
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self._decoder = base.model
        self._head_weight = base.lm_head.weight.detach().to(base_dtype)
        self._vocab_size = base.config.vocab_size
        self._grammars = GrammarMasks(self.tokenizer, self._vocab_size)
        # No dropout anywhere: every log-prob pass must give the same numbers as the engine's.
        self.model.eval()

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def logprobs(self, samples: Sequence[TrainingSample]) -> Tensor:
        """Log-probs `[B, T]` in float32 of every trained token under the sampler's temperature and grammar;
        0 elsewhere, rows padded on the right. One forward pass over the samples' prefix tree."""
        row = pack(samples)
        targets = _Targets(samples, row)
        trained = token_logprobs(
            self._hidden_states(row)[self._tensor(targets.contexts)],
            self._head_weight,
            self._tensor(targets.temperatures),
            self._constraint(targets),
            self._tensor(targets.context_of),
            self._tensor(targets.tokens),
        )
        shape = (len(samples), max(len(sample.token_ids) for sample in samples))
        where = self._tensor(targets.rows), self._tensor(targets.columns)
        return torch.zeros(shape, device=self.device).index_put(where, trained)

    def _hidden_states(self, row: PackedRow) -> Tensor:
        blocks = plan_attention(row.attention_mask(), self.device)
        with self._precision():
            output = self._decoder(
                input_ids=self._tensor(row.token_ids)[None],
                position_ids=self._tensor(row.positions)[None],
                use_cache=False,
                tree_blocks=blocks,
            )
        return output.last_hidden_state[0]

    def _constraint(self, targets: "_Targets") -> Constrain:
        """What the sampler's grammar allowed after each context, applied to the logits chunk by chunk."""
        bitmask = torch.full((len(targets.contexts), -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        for sample, span, contexts in targets.grammar_spans:
            tokens = sample.token_ids[span.start : span.end]
            bitmask[torch.from_numpy(contexts)] = self._grammars.allowed(span.grammar, tokens)
        bitmask = bitmask.to(self.device)
        return lambda logits, start, end: self._grammars.constrain(logits, bitmask[start:end])

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

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


class _Targets:
    """Where in a packed row the trained tokens are, each distinct context once.

    contexts: `[C]` nodes whose next token is trained. rows, columns, tokens, context_of: `[N]` per trained
    token, `context_of` indexing `contexts`.
    """

    def __init__(self, samples: Sequence[TrainingSample], row: PackedRow) -> None:
        where = [np.nonzero(sample.loss_mask)[0] for sample in samples]
        self.rows = np.repeat(np.arange(len(samples)), [len(columns) for columns in where])
        self.columns = np.concatenate(where)
        nodes = [node_of[columns - 1] for node_of, columns in zip(row.node_of, where, strict=True)]
        self.contexts, self.context_of = np.unique(np.concatenate(nodes), return_inverse=True)
        self.tokens = np.concatenate(
            [sample.token_ids[columns] for sample, columns in zip(samples, where, strict=True)]
        )
        self.temperatures = np.ones(len(self.contexts), dtype=np.float32)
        self.grammar_spans = []
        for sample, own, node_of in zip(samples, nodes, row.node_of, strict=True):
            self.temperatures[np.searchsorted(self.contexts, own)] = sample.temperature
            for span in sample.grammar_spans:
                if sample.loss_mask[span.start]:
                    contexts = np.searchsorted(self.contexts, node_of[span.start - 1 : span.end - 1])
                    self.grammar_spans.append((sample, span, contexts))
