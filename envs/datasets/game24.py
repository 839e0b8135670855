"""Game of 24: hands of four numbers from 1 to 13 that + - * / and brackets can turn into 24."""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations, combinations_with_replacement, product
from pathlib import Path

from envs.datasets.rows import Row, Split, local_rows, public_rows, read_tasks, split_of
from envs.types import Task

TARGET = 24
HAND_SIZE = 4
MAX_NUMBER = 13
PUBLIC_ID = "nlile/24-game"

Hand = tuple[int, ...]


def generate_game24(*, split: Split, seed: int) -> Iterator[Task]:
    """Yield the solvable hands of one split in random order. The two splits are disjoint."""
    all_hands = combinations_with_replacement(range(1, MAX_NUMBER + 1), HAND_SIZE)
    hands = [hand for hand in all_hands if split_of(f"game24 {[*hand]}") == split]
    random.Random(f"game24|{split}|{seed}").shuffle(hands)
    return (_task(f"game24-{'-'.join(map(str, hand))}", hand) for hand in hands if is_solvable(hand))


def load_game24(path: Path | None = None) -> list[Task]:
    """Load all solvable hands of a file, or else of the public data set. Raises ValueError."""
    rows = local_rows(path) if path else public_rows(PUBLIC_ID)
    return read_tasks(rows, path or PUBLIC_ID, _hand_of)


def _hand_of(row: Row, index: int) -> Task | None:
    if not row.get("solvable", True):
        return None
    numbers = row.get("numbers") or next(filter(None, map(_numbers_in, (row.get("answer"), row.get("question")))), None)
    hand = numbers if isinstance(numbers, list | tuple) else ()
    if len(hand) != HAND_SIZE or not all(type(n) is int and 1 <= n <= MAX_NUMBER for n in hand):
        raise ValueError(
            f"a hand needs `numbers`, or an `answer` or `question` with {HAND_SIZE} integers from 1 to {MAX_NUMBER}, "
            f"got {row!r:.200}"
        )
    return _task(str(row.get("id", f"game24-{index}")), tuple(hand))


def _numbers_in(text: object) -> list[int]:
    """Return the four numbers that a text such as `(1+1+4)*4 = 24` combines, else nothing."""
    first = text[0] if isinstance(text, list) and text else text
    numbers = [int(number) for number in re.findall(r"\d+", str(first)) if int(number) != TARGET]
    return numbers if len(numbers) == HAND_SIZE else []


def _task(id: str, hand: Hand) -> Task:
    return Task(
        id=id,
        dataset="game24",
        question=(
            f"Make {TARGET} from the numbers {', '.join(map(str, hand))}. Use each number exactly once, "
            "with + - * / and brackets. Answer with the expression."
        ),
        answer=" ".join(map(str, hand)),
    )


def is_solvable(numbers: Sequence[int]) -> bool:
    """Return whether an expression that uses each number once equals 24."""
    return any(value == TARGET for value in _results(tuple(sorted(numbers))))


def _results(hand: Hand) -> Iterator[Fraction]:
    """Yield the values of the sorted hand, some of them repeatedly."""
    if len(hand) == 1:
        yield Fraction(hand[0])
    for size in range(1, len(hand) // 2 + 1):
        for left in set(combinations(hand, size)):
            right = tuple(sorted((Counter(hand) - Counter(left)).elements()))
            for a, b in product(_values(left), _values(right)):
                yield from (a + b, a - b, b - a, a * b)
                if b:
                    yield a / b
                if a:
                    yield b / a


@cache
def _values(hand: Hand) -> frozenset[Fraction]:
    return frozenset(_results(hand))
