"""Values of JSON that others wrote: their texts, and how deep they are nested."""

from collections.abc import Callable

from configs.errors import whole_letters

MAX_DEPTH = 100
"""Of what is passed on to others: readers and writers of JSON give up at some depth, many at 200."""


def in_whole_letters(value: object) -> object:
    """Its texts and names in whole letters. Raises RecursionError."""
    return each_text(value, whole_letters)


def each_text(value: object, change: Callable[[str], str]) -> object:
    """Its texts and names changed. Raises RecursionError."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [each_text(one, change) for one in value]
    if isinstance(value, dict):
        return {change(name): each_text(one, change) for name, one in value.items()}
    return value


def check_depth(value: object, most: int = MAX_DEPTH) -> None:
    """Raises RecursionError where more than so many lists and objects stand in each other."""
    if not isinstance(value, (list, dict)):
        return
    if not most:
        raise RecursionError
    for one in value.values() if isinstance(value, dict) else value:
        check_depth(one, most - 1)
