"""The text of each token of a trajectory, from the tokenizer that the run kept."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from learner.demo_model import demo_model_dir
from rollout.records import TOKENIZER

MAX_PROMPT_CHARS = 20_000


class TokenTexts:
    """`folder` is the run's. Runs of earlier releases kept no tokenizer: then the one of the model folder that their
    configuration names is taken, and where there is none tokens have no texts."""

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

        path = next((one for one in self._places() if one.is_file()), None)
        return None if path is None else Tokenizer.from_file(str(path))

    def _places(self) -> list[Path]:
        own = self._folder / TOKENIZER
        try:
            model = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))["model"]["path"]
        except (OSError, ValueError, KeyError, TypeError):
            return [own]
        return [own, (demo_model_dir() if model == "demo" else Path(model)) / TOKENIZER]
