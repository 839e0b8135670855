"""What a problem is for, decided by its hash alone, so that no problem is ever on two sides."""

import hashlib
import re
import unicodedata
from typing import Literal

from envs.types import Task

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")

Purpose = Literal["rl", "demonstrations", "prm"]
# One entry a slot: RL gets half of the training questions, the other two a quarter each.
_PURPOSES: tuple[Purpose, ...] = ("rl", "rl", "demonstrations", "prm")


def split_of(key: str) -> Split:
    """The same key gives the same half in every process, whatever the seed of the run."""
    return SPLITS[_digest(f"split:{key}")[0] % len(SPLITS)]


def purpose_of(question: str) -> Purpose:
    """What a generated training question is for: the same for a question in other case, spacing or punctuation."""
    return _PURPOSES[_digest(f"purpose:{question_key(question)}")[0] % len(_PURPOSES)]


def kept_with(task: Task) -> str:
    """The text whose hash says what a task is for. It is the question, or the task's own `kept_with`: where the
    question says more than what is asked, to tell tasks apart that ask the same."""
    return str(task.metadata.get("kept_with") or task.question)


def question_key(question: str) -> str:
    """The same for a question in other case, spacing or punctuation."""
    folded = unicodedata.normalize("NFKC", question).casefold()
    return hashlib.sha256(" ".join(re.findall(r"\w+|[-+*/=^<>]", folded)).encode(errors="replace")).hexdigest()


class TooFewTasksError(ValueError):
    """More tasks are asked for than a data set has: `found`."""

    def __init__(self, dataset: str, split: Split, *, wanted: int, found: int) -> None:
        super().__init__(f"{wanted} {split} tasks of {dataset!r} were asked for, it has {found}")
        self.found = found


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
