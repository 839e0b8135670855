"""A skill in one reply: two steps in words become one expression. Tasks, reward, and a teacher who is mostly wrong.

    "Take 17 from 64, then multiply by 3." -> "(64-17)*3"

Right is what uses the sentence's three numbers once each and has its value, with whatever brackets. The teacher mixes
up the two operators in half of its demonstrations, and draws others at random in a quarter: the form can be imitated,
which sign belongs where is for RL to find out.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from reward.scorers.game24 import is_solution

if TYPE_CHECKING:
    from envs.types import Task

SIZES = {"train": 2000, "eval": 200, "demonstrations": 256}
"""Tasks of each split; no two ask the same."""
SIGNS = "+-*"
FIRST = {"+": "Add {a} and {b}", "-": "Take {b} from {a}", "*": "Multiply {a} by {b}"}
SECOND = {"+": "then add {c}", "-": "then take away {c}", "*": "then multiply by {c}", "c-": "then take that from {c}"}
FORMS = tuple((first, second) for first, second in product(FIRST, SECOND) if first != second[-1])
"""Of two different signs: exchanged, they give another value."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """Two steps: `a first b`, then the sign `second` and `c`, or with `c-` that much less than `c`."""

    first: str
    second: str
    a: int
    b: int
    c: int

    @property
    def question(self) -> str:
        steps = f"{FIRST[self.first]}, {SECOND[self.second]}".format(a=self.a, b=self.b, c=self.c)
        return f"Write as one expression: {steps}."

    @property
    def value(self) -> int:
        signs = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
        result = signs[self.first](self.a, self.b)
        return self.c - result if self.second == "c-" else signs[self.second](result, self.c)

    def written(self, first: str, second: str) -> str:
        """With these signs in the places of its own."""
        inside = f"({self.a}{first}{self.b})"
        return f"{self.c}{second}{inside}" if self.second == "c-" else f"{inside}{second}{self.c}"

    @property
    def row(self) -> Mapping[str, Any]:
        own = self.first, self.second[-1]
        others = [pair for pair in product(SIGNS, SIGNS) if pair not in (own, own[::-1])]
        return {
            "question": self.question,
            "answer": self.written(*own),
            "numbers": [self.a, self.b, self.c],
            "value": self.value,
            "mixed_up": self.written(*own[::-1]),
            "others": [self.written(*pair) for pair in others],
        }


def tasks() -> Iterator[Mapping[str, Any]]:
    rng, seen = random.Random("expressions"), set[Sentence]()
    for split, size in SIZES.items():
        wanted = len(seen) + size
        while len(seen) < wanted:
            sentence = Sentence(*rng.choice(FORMS), *rng.sample(range(2, 100), 3))
            if sentence not in seen:
                seen.add(sentence)
                yield {**sentence.row, "split": split}


def solved(text: str, numbers: Sequence[int], value: int) -> float:
    return float(is_solution(text, numbers, value))


def score(task: "Task", answer: str) -> float:
    return solved(answer, task.metadata["numbers"], task.metadata["value"])


async def teach(task: "Task", messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Right in a quarter of all tasks."""
    rng, (mixed_up, others) = random.Random(task.id), (task.metadata["mixed_up"], task.metadata["others"])
    return str(rng.choice((task.answer, mixed_up, mixed_up, rng.choice(others))))
