"""A taskset of the verifiers library: write a made-up word backwards.

The reward is the similarity to the right text: twice the letters of the common pieces over the letters of both.
"""

import random
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import product
from typing import Literal

import verifiers.v1 as vf

CONSONANTS, VOWELS = "bdfgklmnprst", "aeiou"


class ReverseTextData(vf.TaskData):
    text: str


class ReverseTextTask(vf.Task[ReverseTextData]):
    @vf.reward
    async def similarity(self, trace: vf.Trace) -> float:
        return SequenceMatcher(None, trace.last_reply, self.data.text[::-1], autojunk=False).ratio()


class ReverseTextConfig(vf.TasksetConfig):
    num_texts: int = 1500
    num_held_out: int = 300
    """Texts that are never used in training."""
    split: Literal["train", "eval"] = "train"


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    def load(self) -> Iterator[ReverseTextTask]:
        config = self.config
        texts = ["".join(letters) for letters in product(CONSONANTS, VOWELS, CONSONANTS, VOWELS)]
        random.Random("reverse text").shuffle(texts)
        held_out, others = texts[: config.num_held_out], texts[config.num_held_out :]
        for text in held_out if config.split == "eval" else others[: config.num_texts]:
            data = ReverseTextData(prompt=f"Write this text backwards, letter by letter: {text}", text=text)
            yield ReverseTextTask(data, config.task)


__all__ = ["ReverseTextTaskset"]
