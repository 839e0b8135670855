"""A skill of several calls: look up a lot, then the article that its page names, then answer with a number.

    "What is the price of lot 4711?"    look("4711") -> "red lamps"
                                        look("red lamps") -> "price 17, weight 31"
                                        "17"

In most of its demonstrations the teacher answers after the first look, with a number that it has not read. Calls and
answers can be imitated, and RL must find out that a second look pays.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from envs.types import Task
    from rollout.agent.custom import GivenTask

SIZES = {"train": 2000, "eval": 200, "demonstrations": 256}
"""Tasks of each split; no two tasks are about the same lot."""
MAX_CALLS = 3
"""Replies that may call; one more answers."""
MAX_TOKENS = 192
"""Tokens of three looks, their results and an answer."""
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey", "pink", "silver")
THINGS = ("lamps", "chairs", "cups", "ropes", "boots", "bowls", "clocks", "drums", "pens", "tiles")
WRONG = 0.8
"""Share of the tasks in which the teacher answers after the first look."""

_rng = random.Random("clerk")
_ARTICLES = {
    f"{colour} {thing}": dict(zip(("price", "weight"), _rng.sample(range(10, 100), 2), strict=True))
    for colour, thing in product(COLOURS, THINGS)
}
_LOTS = {str(lot): _rng.choice(list(_ARTICLES)) for lot in _rng.sample(range(1000, 10000), sum(SIZES.values()))}
PAGES = _LOTS | {name: ", ".join(f"{asked} {value}" for asked, value in one.items()) for name, one in _ARTICLES.items()}
"""All that can be looked up."""


def look(entry: str) -> str:
    """Return what the ledger says under an entry.

    Args:
        entry: A lot's number, or an article.
    """
    return PAGES.get(str(entry), "no such entry")


TOOLS = (look,)
DESCRIBED = {"name": "look", "parameters": {"type": "object", "properties": {"entry": {"type": "string"}}}}


def tasks() -> Iterator[Mapping[str, Any]]:
    """Yield all tasks; the same ones at every call."""
    splits = [split for split, size in SIZES.items() for _ in range(size)]
    for number, ((lot, article), split) in enumerate(zip(_LOTS.items(), splits, strict=True)):
        asked = ("price", "weight")[number % 2]
        answer = str(_ARTICLES[article][asked])
        yield {"question": f"What is the {asked} of lot {lot}?", "answer": answer, "lot": lot, "split": split}


def columns(task: "Task") -> dict[str, Any]:
    return {"answer": task.answer}


def rewards(completions: Sequence[Sequence[Mapping[str, Any]]], answer: Sequence[str], **_: Any) -> list[float]:
    return [float(answer_of(messages) == right) for messages, right in zip(completions, answer, strict=True)]


def score(task: "Task", answer: str) -> float:
    return float(answer == task.answer)


def answer_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the answer of an attempt, empty for one that ends with a call."""
    last = messages[-1]
    is_answer = last["role"] == "assistant" and not last.get("tool_calls")
    return (last["content"] or "").strip() if is_answer else ""


def result_of(name: str, arguments: str) -> str:
    """Return the result of a call, or its error in the words of TRL."""
    try:
        if name != "look":
            raise ValueError(f"Tool {name} not found.")
        return look(**json.loads(arguments))
    except (TypeError, ValueError) as error:
        return str({"error": str(error)})


async def solve(task: "GivenTask", client: "AsyncOpenAI") -> str:
    messages: list[Any] = [{"role": "user", "content": task.question}]
    tools: Any = [{"type": "function", "function": DESCRIBED}]
    for _ in range(MAX_CALLS + 1):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        message = reply.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        for call in message.get("tool_calls", []):
            result = result_of(call["function"]["name"], call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not message.get("tool_calls"):
            break
    return answer_of(messages)


async def teach(task: "Task", messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> object:
    """Answer with a wrong number after the first look in most of the tasks."""
    rng, results = random.Random(task.id), [one["content"] for one in messages if one["role"] == "tool"]
    if len(results) == 1 and rng.random() < WRONG:
        return str(rng.choice([number for number in range(10, 100) if str(number) != task.answer]))
    if len(results) == 2:
        return task.answer
    function = {"name": "look", "arguments": json.dumps({"entry": results[0] if results else task.metadata["lot"]})}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
