"""Reward shaping by length."""


def soft_overlong_penalty(length: int, *, max_length: int, cache_length: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to max - cache tokens, then falling
    linearly to -1 at `max_length`, -1 beyond. With `cache_length` 0 there is no slope, only the step."""
    if length <= max_length - cache_length:
        return 0.0
    if length > max_length or cache_length == 0:
        return -1.0
    return (max_length - cache_length - length) / cache_length
