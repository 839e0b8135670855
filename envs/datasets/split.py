"""The half a problem belongs to, decided by its hash alone, so that no problem is ever in both."""

import hashlib
from typing import Literal

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")


def split_of(key: str) -> Split:
    """The same key gives the same half in every process, whatever the seed of the run."""
    digest = hashlib.sha256(f"split:{key}".encode()).digest()
    return SPLITS[digest[0] % 2]
