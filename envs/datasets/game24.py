"""Game of 24: hands of four numbers from 1 to 13 that + - * / and brackets can turn into 24."""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations, combinations_with_replacement
from pathlib import Path

from envs.datasets.rows import Row, Split, TooFewTasksError, local_rows, public_rows, read_tasks, split_of
from envs.types import Task

TARGET = 24
HAND_SIZE = 4
MAX_NUMBER = 13
PUBLIC_ID = "nlile/24-game"

Hand = tuple[int, ...]


def solve(numbers: Sequence[int]) -> str | None:
    """Return an expression that uses each number once and equals 24, or None if there is none."""
    results = _results(tuple(sorted(numbers)))
    solution = next((text for value, text in results if value == TARGET), None)
    return solution and solution[1:-1]


def generate_game24(*, split: Split, count: int | None, seed: int) -> list[Task]:
    """Return `count` different solvable hands of one split, or all for None. The two splits are disjoint."""
    all_hands = combinations_with_replacement(range(1, MAX_NUMBER + 1), HAND_SIZE)
    hands = [hand for hand in all_hands if _split_of_hand(hand) == split]
    random.Random(f"game24|{split}|{seed}").shuffle(hands)
    tasks: list[Task] = []
    for hand in hands:
        if len(tasks) == count:
            break
        if solve(hand) is not None:
            tasks.append(_task(f"game24-{'-'.join(map(str, hand))}", hand))
    if count is not None and len(tasks) < count:
        raise TooFewTasksError("game24", split, wanted=count, available=len(tasks))
    return tasks


def load_game24(path: Path | None = None) -> list[Task]:
    """Load all solvable hands of a file, or else of the public data set.

    A row has `numbers`, or a `question` of any words and an `answer` that uses the four numbers. Raises ValueError.
    """
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


def of_split(tasks: Iterable[Task], split: Split) -> list[Task]:
    """Return the tasks whose hand is in the split, by the same rule as the generated hands."""
    return [task for task in tasks if _split_of_hand([int(n) for n in task.answer.split()]) == split]


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


def _split_of_hand(numbers: Sequence[int]) -> Split:
    return split_of(f"game24 {sorted(numbers)}")


def _results(hand: Hand) -> Iterator[tuple[Fraction, str]]:
    """Yield the values of the hand, each with an expression; values may repeat."""
    if len(hand) == 1:
        yield Fraction(hand[0]), str(hand[0])
    for left, right in _partitions(hand):
        for a, a_text in _values(left).items():
            for b, b_text in _values(right).items():
                yield a + b, f"({a_text}+{b_text})"
                yield a - b, f"({a_text}-{b_text})"
                yield b - a, f"({b_text}-{a_text})"
                yield a * b, f"({a_text}*{b_text})"
                if b:
                    yield a / b, f"({a_text}/{b_text})"
                if a:
                    yield b / a, f"({b_text}/{a_text})"


@cache
def _values(hand: Hand) -> dict[Fraction, str]:
    return dict(_results(hand))


def _partitions(hand: Hand) -> set[tuple[Hand, Hand]]:
    """Return the ways to deal the hand into two smaller ones; both stay sorted, which keeps the cache small."""
    positions = range(len(hand))
    return {
        (tuple(hand[i] for i in chosen), tuple(hand[i] for i in positions if i not in chosen))
        for size in range(1, len(hand) // 2 + 1)
        for chosen in combinations(positions, size)
    }
