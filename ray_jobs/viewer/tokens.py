"""The text of each token of a trajectory, from the tokenizer that the run kept."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rollout.records import TOKENIZER

MAX_PROMPT_CHARS = 20_000


class TokenTexts:
    """`folder` is the run's. Where no tokenizer is in it, tokens have no texts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add_to(self, record: dict[str, Any]) -> None:
        """Put `pieces` (a text per sampled token) and `prompt_text` (what is new in the prompt) into each turn, in the
        place of the prompt's token ids."""
        for turn in record["turns"]:
            prompt = turn.pop("prompt_token_ids", [])
            if self._tokenizer is not None:
                turn["pieces"] = self._pieces(turn["token_ids"])
                turn["prompt_text"] = self._tokenizer.decode(prompt, skip_special_tokens=False)[:MAX_PROMPT_CHARS]

    def _pieces(self, token_ids: Sequence[int]) -> list[str]:
        """A character of several tokens stands at the last of them."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        pieces = []
        for token in token_ids:
            try:
                pieces.append(stream.step(self._tokenizer, token) or "")
            except Exception:
                # Bytes that are no text; the library names no class of its own for them.
                stream = DecodeStream(skip_special_tokens=False)
                pieces.append("\N{REPLACEMENT CHARACTER}")
        return pieces

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        path = self._folder / TOKENIZER
        return Tokenizer.from_file(str(path)) if path.is_file() else None
