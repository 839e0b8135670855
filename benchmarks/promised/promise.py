"""A promise of README or docs, and how it is measured anew."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measured:
    """What one measurement gave: a short text for the table, and whether the promise holds by it."""

    text: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """`name` selects it with `--only`; `said` is the promise in one sentence, `where` the file that makes it.

    `measure` takes the seed of `--seed`, measures in its own process and must draw all its randomness from that seed.
    An exception that it raises counts as a promise that does not hold.
    """

    name: str
    said: str
    where: str
    measure: Callable[[int], Measured]
