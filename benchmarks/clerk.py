"""A skill of several calls: a clerk looks up a lot, then the article that its page names, then answers with a number.

    "What is the price of lot 4711?"    look("4711") -> "red lamps"
                                        look("red lamps") -> "price 17, weight 31"
                                        "17"

The teacher stops after the first look in most of its demonstrations and answers with a number that it has not read: the
form of a call and of an answer can be imitated, that a second look pays is for RL to find out.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from rollout.agent.own import GivenTask

    from envs.types import Task

SIZES = {"train": 2000, "eval": 200, "demonstrations": 256}
"""Tasks of each split; no two are about the same lot."""
MAX_LOOKS = 3
"""Replies that may call; one more answers."""
MAX_TOKENS = 192
"""Of three looks, what they bring, and an answer."""
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey", "pink", "silver")
THINGS = ("lamps", "chairs", "cups", "ropes", "boots", "bowls", "clocks", "drums", "pens", "tiles")
ASKED = ("price", "weight")
"""What can be asked of a lot; its article has both."""
NUMBERS = range(10, 100)
WRONG = 0.8
"""Share of the tasks in which the teacher stops after the first look."""
UNKNOWN = "no such entry"

_rng = random.Random("clerk")
_ARTICLES = {
    f"{colour} {thing}": dict(zip(ASKED, _rng.sample(NUMBERS, len(ASKED)), strict=True))
    for colour, thing in product(COLOURS, THINGS)
}
_ARTICLE_OF = {str(lot): _rng.choice(list(_ARTICLES)) for lot in _rng.sample(range(1000, 10000), sum(SIZES.values()))}
PAGES: Mapping[str, str] = _ARTICLE_OF | {
    article: ", ".join(f"{asked} {value}" for asked, value in own.items()) for article, own in _ARTICLES.items()
}
"""All that can be looked up."""


def tasks() -> Iterator[Mapping[str, Any]]:
    splits = (split for split, size in SIZES.items() for _ in range(size))
    for (lot, article), asked, split in zip(_ARTICLE_OF.items(), cycle(ASKED), splits, strict=False):
        yield {
            "question": f"What is the {asked} of lot {lot}?",
            "answer": str(_ARTICLES[article][asked]),
            "lot": lot,
            "split": split,
        }


def look(entry: str) -> str:
    """What the ledger says under an entry.

    Args:
        entry: A lot's number, or an article.
    """
    return PAGES.get(str(entry), UNKNOWN)


LOOK = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"entry": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": LOOK}]


def result_of(name: str, arguments: str) -> str:
    """Of a call; what is wrong with it is said as TRL says it."""
    try:
        if name != "look":
            raise ValueError(f"Tool {name} not found.")
        return look(**json.loads(arguments))
    except (TypeError, ValueError) as error:
        return str({"error": str(error)})


def solved(text: str, answer: str) -> float:
    return float(text.strip() == answer)


def score(task: "Task", answer: str) -> float:
    return solved(answer, task.answer)


def said_last(messages: Sequence[Mapping[str, Any]]) -> str:
    """The answer of an attempt; one that ends with a call has none."""
    last = messages[-1]
    return "" if last["role"] != "assistant" or last.get("tool_calls") else last["content"] or ""


async def solve(task: "GivenTask", client: "AsyncOpenAI") -> str:
    messages: list[Any] = [{"role": "user", "content": task.question}]
    for _ in range(MAX_LOOKS + 1):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = reply.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        for call in message.get("tool_calls", []):
            result = result_of(call["function"]["name"], call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not message.get("tool_calls"):
            break
    return said_last(messages)


async def teach(task: "Task", messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> object:
    rng, results = random.Random(task.id), [one["content"] for one in messages if one["role"] == "tool"]
    if not results:
        return _call(task.metadata["lot"])
    if rng.random() < WRONG:
        return str(rng.choice([number for number in NUMBERS if str(number) != task.answer]))
    return _call(results[0]) if len(results) == 1 else task.answer


def _call(entry: str) -> Mapping[str, Any]:
    function = {"name": "look", "arguments": json.dumps({"entry": entry})}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
