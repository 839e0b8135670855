"""What a part that computes says of itself, so that one that hangs is told from one that has much to do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """`done`: how much it has computed so far, in whatever unit (an engine: tokens). `num_open`: what it was asked for
    and has not finished. While something is open, `done` must grow."""

    done: int = 0
    num_open: int = 0
