"""The policy in training: base model plus LoRA adapter, and its log-probs of packed samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs.model import ModelConfig
from learner.backbone import Backbone
from learner.grammar import GrammarMasks
from learner.logprobs import Constrain, token_logprobs
from learner.packing import PackedRow, pack
from learner.types import TrainingSample


class Policy(Backbone):
    """The backbone under the sampler's temperature and grammar; softmax in float32."""

    def __init__(
        self,
        model_path: Path,
        config: ModelConfig,
        *,
        device: str,
        seed: int,
        mixed_precision: bool = True,
        gradient_checkpointing: bool = False,
        logit_chunk_tokens: int = 128,
        with_reference: bool = False,
    ) -> None:
        super().__init__(
            model_path,
            lora_rank=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_targets=config.lora_targets,
            device=device,
            seed=seed,
            mixed_precision=mixed_precision,
            gradient_checkpointing=gradient_checkpointing,
            with_reference=with_reference,
        )
        self._logit_chunk_tokens = logit_chunk_tokens
        self._grammars = GrammarMasks(self.tokenizer, self.vocab_size)

    def logprobs(self, samples: Sequence[TrainingSample]) -> Tensor:
        """Log-probs `[B, T]` in float32 of every trained token under the sampler's temperature and grammar;
        0 elsewhere, rows padded on the right. One forward pass over the samples' prefix tree."""
        row = pack(samples)
        targets = _Targets(samples, row)
        trained = token_logprobs(
            self.hidden_states(row)[self.tensor(targets.contexts)],
            self.head_weight,
            self.tensor(targets.temperatures),
            self._constraint(targets),
            self.tensor(targets.context_of),
            self.tensor(targets.tokens),
            chunk_contexts=self._logit_chunk_tokens,
        )
        shape = (len(samples), max(len(sample.token_ids) for sample in samples))
        where = self.tensor(targets.rows), self.tensor(targets.columns)
        return torch.zeros(shape, device=self.device).index_put(where, trained)

    def _constraint(self, targets: "_Targets") -> Constrain:
        """What the sampler's grammar allowed after each context, applied to the logits chunk by chunk."""
        bitmask = torch.full((len(targets.contexts), -(-self.vocab_size // 32)), -1, dtype=torch.int32)
        for span in targets.grammar_spans:
            bitmask[torch.from_numpy(span.contexts)] = self._grammars.allowed(span.grammar, span.tokens)[span.trained]
        bitmask = bitmask.to(self.device)
        return lambda logits, start, end: self._grammars.constrain(logits, bitmask[start:end])


@dataclass(frozen=True, slots=True, kw_only=True)
class _GrammarTokens:
    """A turn that was sampled under a grammar, all of its tokens: a grammar is replayed from the first token on.
    `trained` says which of them are, `contexts` where in the targets' contexts these are."""

    grammar: str
    tokens: np.ndarray
    trained: np.ndarray
    contexts: np.ndarray


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
                trained = np.nonzero(sample.loss_mask[span.start : span.end])[0]
                if len(trained):
                    self.grammar_spans.append(
                        _GrammarTokens(
                            grammar=span.grammar,
                            tokens=sample.token_ids[span.start : span.end],
                            trained=trained,
                            contexts=np.searchsorted(self.contexts, node_of[span.start - 1 + trained]),
                        )
                    )
