"""The policy: log-probs of tokens under the sampler's temperature and grammar masks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs.learner import LOGIT_CHUNK_TOKENS, LearnerConfig, ModelConfig
from learner.backbone import Backbone
from learner.packing import PackedRow, pack
from learner.types import TrainingSample
from rollout.chat import reply_ends

Constrain = Callable[[Tensor, int, int], None]
"""`constrain(logits, start, end)` sets the logits `[end - start, V]` of tokens that the grammar did not allow after
contexts start to end to -inf."""


class TokenLogprobs(torch.autograd.Function):
    """Float32 log-softmax of `hidden @ head_weight.T / temperature` over the tokens left by `constrain`, at `tokens`.

    For logits z = h W^T / T, d logp(token) / d h = (W[token] - softmax(z) W) / T. The second term depends on the
    incoming gradient only through a factor per context, so it is computed in the forward pass, chunk by chunk, and no
    `[C, V]` tensor outlives its chunk.

    Both terms are taken relative to W[top], the row of the context's most likely token: where it is nearly certain they
    are nearly equal, and a bf16 product would round away their difference, the whole gradient. softmax(z) W - W[top] is
    the sum over all other tokens of p (W[v] - W[top]).
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        head_weight: Tensor,
        temperatures: Tensor,
        constrain: Constrain,
        context_of: Tensor,
        tokens: Tensor,
        chunk_contexts: int,
    ) -> Tensor:
        """Return `[N]`, the log-prob of tokens[n] after context context_of[n], differentiable in `hidden` `[C, H]`.

        `head_weight` `[V, H]` is frozen, `temperatures` are `[C]`. Logits of `chunk_contexts` contexts exist at a time.
        """
        result = torch.empty(len(tokens), device=hidden.device)
        expected = torch.empty(hidden.shape, device=hidden.device)
        top = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        for start in range(0, len(hidden), chunk_contexts):
            end = min(start + chunk_contexts, len(hidden))
            logits = (hidden[start:end].to(head_weight.dtype) @ head_weight.T).float()
            logits.div_(temperatures[start:end, None])
            constrain(logits, start, end)
            in_chunk = ((context_of >= start) & (context_of < end)).nonzero().squeeze(-1)
            chosen = logits[context_of[in_chunk] - start, tokens[in_chunk]]
            normalizer = torch.logsumexp(logits, dim=-1)
            result[in_chunk] = chosen - normalizer[context_of[in_chunk] - start]
            if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
                probabilities = logits.sub_(normalizer[:, None]).exp_()
                top[start:end] = probabilities.argmax(dim=-1)
                others = probabilities.scatter_(1, top[start:end, None], 0.0)
                expected[start:end] = (others.to(head_weight.dtype) @ head_weight).float()
                expected[start:end] -= others.sum(dim=-1, keepdim=True) * head_weight[top[start:end]].float()
        ctx.save_for_backward(expected, top, head_weight, temperatures, context_of, tokens)
        ctx.hidden_dtype = hidden.dtype  # type: ignore[attr-defined]
        return result

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        expected, top, head_weight, temperatures, context_of, tokens = ctx.saved_tensors  # type: ignore[attr-defined]
        mass = torch.zeros(len(expected), device=expected.device).index_add_(0, context_of, grad)
        result = expected.mul(-mass[:, None])
        difference = head_weight[tokens].float() - head_weight[top[context_of]].float()
        result.index_add_(0, context_of, difference * grad[:, None])
        result.div_(temperatures[:, None])
        return result.to(ctx.hidden_dtype), None, None, None, None, None, None  # type: ignore[attr-defined]


class Policy(Backbone):
    """A backbone whose log-probs have the sampler's temperature and grammar. The softmax is in float32."""

    def __init__(
        self,
        model_path: Path,
        model: ModelConfig,
        config: LearnerConfig,
        *,
        seed: int,
        base_weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(
            model_path,
            model,
            device=config.device,
            seed=seed,
            mixed_precision=config.precision == "bfloat16",
            gradient_checkpointing=config.gradient_checkpointing,
            with_reference=config.has_reference,
            attention=config.attention,
            base_weights=base_weights,
        )
        import xgrammar

        self._reply_ends = reply_ends(model_path, self.tokenizer)
        info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=self.vocab_size)
        self._compiled = cache(xgrammar.GrammarCompiler(info).compile_grammar)

    def prepare(self, samples: Sequence[TrainingSample]) -> "Prepared":
        """Do the part of a forward pass that does not depend on the weights, in any thread, one call at a time."""
        row = pack(samples)
        targets = _find_targets(samples, row)
        allowed = self._allowed(samples, targets)
        # A token that is the only one the grammar allows has log-prob 0 and gradient 0 under any weights.
        free = np.bitwise_count(allowed.numpy().view(np.uint32)).sum(axis=1) > 1
        allowed = allowed[free].pin_memory() if self.device.type == "cuda" else allowed[free]
        return Prepared(samples=tuple(samples), row=row, targets=targets.only(free), allowed=allowed)

    def logprobs(self, prepared: "Prepared | Sequence[TrainingSample]") -> Tensor:
        """Return the log-probs `[B, T]` in float32 of all trained tokens, 0 elsewhere, in one forward pass."""
        from xgrammar import apply_token_bitmask_inplace

        if not isinstance(prepared, Prepared):
            prepared = self.prepare(prepared)
        targets, allowed = prepared.targets, prepared.allowed.to(self.device, non_blocking=True)
        trained: Tensor = TokenLogprobs.apply(
            self.hidden_states(prepared.row)[self.tensor(targets.contexts)],
            self.head_weight,
            self.tensor(targets.temperatures),
            lambda logits, start, end: apply_token_bitmask_inplace(logits, allowed[start:end]),
            self.tensor(targets.context_of),
            self.tensor(targets.tokens),
            LOGIT_CHUNK_TOKENS,
        )
        samples = prepared.samples
        shape = (len(samples), max(len(sample.token_ids) for sample in samples))
        where = self.tensor(targets.rows), self.tensor(targets.columns)
        return torch.zeros(shape, device=self.device).index_put(where, trained)

    def _allowed(self, samples: Sequence[TrainingSample], targets: "_Targets") -> Tensor:
        """Return the bitmask `[C, ceil(vocab / 32)]` int32 of the tokens that the grammar allowed after each context.

        A grammar is replayed from its turn's first token, trained or not.
        """
        bitmask = torch.full((len(targets.contexts), -(-self.vocab_size // 32)), -1, dtype=torch.int32)
        for number, sample in enumerate(samples):
            in_row = targets.rows == number
            columns, context_of = targets.columns[in_row], targets.context_of[in_row]
            for span in sample.grammar_spans:
                trained = (columns >= span.start) & (columns < span.end)
                if trained.any():
                    allowed = self._replay(span.grammar, sample.token_ids[span.start : span.end])
                    bitmask[torch.from_numpy(context_of[trained])] = allowed[columns[trained] - span.start]
        return bitmask

    def _replay(self, grammar: str, token_ids: np.ndarray) -> Tensor:
        """Return the bitmask `[len(token_ids), ceil(vocab / 32)]` int32 of the tokens allowed at each position.

        Raises ValueError if the tokens were not sampled under the grammar.
        """
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._compiled(grammar), override_stop_tokens=self._reply_ends)
        bitmask = xgrammar.allocate_token_bitmask(len(token_ids), self.vocab_size)
        for position, token in enumerate(token_ids.tolist()):
            matcher.fill_next_token_bitmask(bitmask, position)
            if not matcher.accept_token(token):
                raise ValueError(f"token {token} at position {position} does not follow the sampler's grammar")
        return bitmask


@dataclass(frozen=True, slots=True, kw_only=True)
class _Targets:
    """The N trained tokens of a packed row, and their C distinct contexts."""

    contexts: np.ndarray
    """`[C]`, nodes whose next token is trained, once for each way in which it was sampled (`_ways`)."""
    temperatures: np.ndarray
    """`[C]`."""
    rows: np.ndarray
    """`[N]`, the sample."""
    columns: np.ndarray
    """`[N]`, the position in the sample."""
    tokens: np.ndarray
    """`[N]`."""
    context_of: np.ndarray
    """`[N]`, index into `contexts`."""

    def only(self, kept: np.ndarray) -> "_Targets":
        """Return the tokens after the contexts for which `kept` `[C]` is true."""
        tokens = kept[self.context_of]
        return _Targets(
            contexts=self.contexts[kept],
            temperatures=self.temperatures[kept],
            rows=self.rows[tokens],
            columns=self.columns[tokens],
            tokens=self.tokens[tokens],
            context_of=(np.cumsum(kept) - 1)[self.context_of[tokens]],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Samples that are ready for a forward pass, without the trained tokens that were the only choice."""

    samples: tuple[TrainingSample, ...]
    row: PackedRow
    targets: _Targets
    allowed: Tensor
    """Of `Policy._allowed`."""


def _find_targets(samples: Sequence[TrainingSample], row: PackedRow) -> _Targets:
    trained, ways = [np.nonzero(sample.loss_mask)[0] for sample in samples], _ways(samples)
    nodes = np.concatenate([node_of[columns - 1] for node_of, columns in zip(row.node_of, trained, strict=True)])
    way_of = np.concatenate([way[columns] for way, columns in zip(ways, trained, strict=True)])
    num_ways = 1 + int(way_of.max(initial=0))
    keys, first, context_of = np.unique(nodes * num_ways + way_of, return_index=True, return_inverse=True)
    lengths = [len(columns) for columns in trained]
    temperatures = np.repeat(np.array([sample.temperature for sample in samples], dtype=np.float32), lengths)
    return _Targets(
        contexts=keys // num_ways,
        temperatures=temperatures[first],
        rows=np.repeat(np.arange(len(samples)), lengths),
        columns=np.concatenate(trained),
        tokens=np.concatenate([sample.token_ids[columns] for sample, columns in zip(samples, trained, strict=True)]),
        context_of=context_of,
    )


def _ways(samples: Sequence[TrainingSample]) -> list[np.ndarray]:
    """Return, for each sample, `[T]` numbers of the way in which each token was sampled.

    A way is a temperature, a grammar and the grammar's first token. A custom agent may use one prompt in several.
    """
    numbers: dict[tuple[float, str | None, int], int] = {}
    ways = []
    for sample in samples:
        free = numbers.setdefault((sample.temperature, None, 0), len(numbers))
        way_of = np.full(len(sample.token_ids), free, dtype=np.int64)
        for span in sample.grammar_spans:
            way = (sample.temperature, span.grammar, span.start)
            way_of[span.start : span.end] = numbers.setdefault(way, len(numbers))
        ways.append(way_of)
    return ways
