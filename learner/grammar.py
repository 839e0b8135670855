"""The sampler's grammar on the learner's side: which tokens were allowed at each trained position.

The engine samples from the grammar-constrained distribution, so that is the policy. Log-probs over the whole
vocabulary would be those of another policy, and the ratio to the engine's would be off wherever the
unconstrained model would rather have written something else.
"""

from typing import Any

import numpy as np
import torch


class GrammarMasks:
    """Compiles each grammar once and replays sampled tokens through it."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        self._vocab_size = vocab_size
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._compiler = xgrammar.GrammarCompiler(info)
        self._compiled: dict[str, Any] = {}

    def allowed(self, grammar: str, token_ids: np.ndarray) -> torch.Tensor:
        """Bitmask `[len(token_ids), ceil(vocab / 32)]` int32 of the tokens allowed at each position.

        Raises ValueError when the tokens do not follow the grammar: they were not sampled under it.
        """
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compiler.compile_grammar(grammar)
        matcher = self._xgrammar.GrammarMatcher(self._compiled[grammar])
        bitmask = self._xgrammar.allocate_token_bitmask(len(token_ids), self._vocab_size)
        for position, token in enumerate(token_ids.tolist()):
            matcher.fill_next_token_bitmask(bitmask, position)
            if not matcher.accept_token(token):
                raise ValueError(f"token {token} at position {position} does not follow the sampler's grammar")
        return bitmask

    def constrain(self, logits: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Set the logits `[N, V]` of tokens outside the bitmask `[N, ceil(V / 32)]` to -inf, in place."""
        self._xgrammar.apply_token_bitmask_inplace(logits, bitmask)
