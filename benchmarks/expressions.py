"""A skill in one reply: a sentence with two steps becomes one expression.

    "Take 17 from 64, then multiply by 3." -> "(64-17)*3"

A reply is right if it uses the three numbers once each and has the value of the sentence. The teacher swaps the two
operators in half of its demonstrations and draws other operators in a quarter: the form can be imitated, and RL must
find out which operator belongs where.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from reward.scorers.math import is_solution

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from envs.types import Task
    from rollout.agent.custom import GivenTask

SIZES = {"train": 2000, "eval": 200, "demonstrations": 256}
"""Tasks of each split; no two tasks have the same question."""
TOOLS, DESCRIBED, MAX_CALLS, MAX_TOKENS = (), None, 0, 16
SIGNS = "+-*"
FIRST = {"+": "Add {a} and {b}", "-": "Take {b} from {a}", "*": "Multiply {a} by {b}"}
SECOND = {"+": "then add {c}", "-": "then take away {c}", "*": "then multiply by {c}", "c-": "then take that from {c}"}
FORMS = tuple((first, second) for first, second in product(FIRST, SECOND) if first != second[-1])
"""Pairs of two different operators: swapped, they give another value. `c-` subtracts the first result from `c`."""


def tasks() -> Iterator[Mapping[str, Any]]:
    """Yield all tasks; the same ones at every call."""
    rng, seen = random.Random("expressions"), set[Any]()
    for split, size in SIZES.items():
        wanted = len(seen) + size
        while len(seen) < wanted:
            form, numbers = rng.choice(FORMS), tuple(rng.sample(range(2, 100), 3))
            if (form, numbers) not in seen:
                seen.add((form, numbers))
                yield {**row(*form, *numbers), "split": split}


def row(first: str, second: str, a: int, b: int, c: int) -> Mapping[str, Any]:
    """Return the task `a first b`, then `second c`, with what a teacher writes if it confuses the operators."""

    def written(one: str, other: str) -> str:
        return f"{c}{other}({a}{one}{b})" if second == "c-" else f"({a}{one}{b}){other}{c}"

    signs = (first, second[-1])
    steps = f"{FIRST[first]}, {SECOND[second]}".format(a=a, b=b, c=c)
    return {
        "question": f"Write as one expression: {steps}.",
        "answer": written(*signs),
        "numbers": [a, b, c],
        "value": eval(written(*signs)),
        "swapped": written(*signs[::-1]),
        "others": [written(*pair) for pair in product(SIGNS, SIGNS) if pair not in (signs, signs[::-1])],
    }


def solved(text: str, numbers: Sequence[int], value: int) -> float:
    return float(is_solution(text, numbers, value))


def columns(task: "Task") -> dict[str, Any]:
    return {key: task.metadata[key] for key in ("numbers", "value")}


def rewards(
    completions: Sequence[Sequence[Mapping[str, Any]]],
    numbers: Sequence[Sequence[int]],
    value: Sequence[int],
    **_: Any,
) -> list[float]:
    replies = (messages[-1]["content"].strip() for messages in completions)
    return [solved(*row) for row in zip(replies, numbers, value, strict=True)]


def score(task: "Task", answer: str) -> float:
    return solved(answer, task.metadata["numbers"], task.metadata["value"])


async def solve(task: "GivenTask", client: "AsyncOpenAI") -> str:
    """Answer with the reply of the model."""
    messages: Any = [{"role": "user", "content": task.question}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return (reply.choices[0].message.content or "").strip()


async def teach(task: "Task", messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Reply correctly in a quarter of the tasks."""
    rng, swapped = random.Random(task.id), task.metadata["swapped"]
    return str(rng.choice((task.answer, swapped, swapped, rng.choice(task.metadata["others"]))))
