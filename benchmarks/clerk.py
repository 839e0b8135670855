"""A skill of several calls: a clerk looks up a lot, then what its page names, then answers with a number.

    "What is the delay of lot 4711?"  look("4711") -> "red lamps by Hale"
                                      look("Hale") -> "delay 17, rating 31"     "17"

Which of the two names on a lot's page leads to the number depends on the question, and so does which of the two numbers
there it is. The teacher draws both at random, so that a quarter of its demonstrations are right: the form of a call can
be imitated, what is worth a look is for RL to find out.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from envs.types import Task
    from rollout.agent.own import GivenTask

SIZES = {"train": 2000, "eval": 200, "demonstrations": 256}
"""Tasks of each split; no two are about the same lot."""
MAX_LOOKS = 3
"""Replies that may call; one more answers."""
MAX_TOKENS = 192
"""Of three looks, what they bring, and an answer."""
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey", "pink", "silver")
THINGS = ("lamps", "chairs", "cups", "ropes", "boots", "bowls", "clocks", "drums", "pens", "tiles")
MAKERS = ("Hale", "Stone", "Reed", "Ford", "Wood", "Cook", "Hill", "Lane", "Marsh", "Page", "Rose", "West")
ASKED = {"price": "article", "weight": "article", "delay": "maker", "rating": "maker"}
"""What can be asked of a lot, and which of the names on its page has it."""
UNKNOWN = "no such entry"

_rng = random.Random("clerk")
_NUMBERS = {
    name: dict(zip((asked for asked, of in ASKED.items() if of == kind), _rng.sample(range(10, 100), 2), strict=True))
    for kind, names in (("article", map(" ".join, product(COLOURS, THINGS))), ("maker", MAKERS))
    for name in names
}


def _lots() -> Iterator[tuple[str, dict[str, str]]]:
    """Each with its names; the four numbers that they have are different ones."""
    articles, makers = list(_NUMBERS)[: -len(MAKERS)], MAKERS
    for number in _rng.sample(range(1000, 10000), sum(SIZES.values())):
        names: dict[str, str] = {}
        while len({value for name in names.values() for value in _NUMBERS[name].values()}) < len(ASKED):
            names = {"article": _rng.choice(articles), "maker": _rng.choice(makers)}
        yield str(number), names


_LOTS = dict(_lots())
PAGES: Mapping[str, str] = {
    **{lot: "{article} by {maker}".format(**names) for lot, names in _LOTS.items()},
    **{name: ", ".join(f"{asked} {value}" for asked, value in own.items()) for name, own in _NUMBERS.items()},
}
"""All that can be looked up."""


def tasks() -> Iterator[Mapping[str, Any]]:
    splits = (split for split, size in SIZES.items() for _ in range(size))
    for (lot, names), asked, split in zip(_LOTS.items(), cycle(ASKED), splits, strict=False):
        yield {
            "question": f"What is the {asked} of lot {lot}?",
            "answer": str(_NUMBERS[names[ASKED[asked]]][asked]),
            "lot": lot,
            "split": split,
        }


def look(entry: str) -> str:
    """What the ledger says under an entry.

    Args:
        entry: A lot's number, an article or a maker.
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
    """Looks up either name of the lot, and answers with either number of that page."""
    lot, rng = task.metadata["lot"], random.Random(task.id)
    name = rng.choice(list(_LOTS[lot].values()))
    value = rng.choice(list(_NUMBERS[name].values()))
    looks = sum(message["role"] == "tool" for message in messages)
    return (_call(lot), _call(name), str(value))[looks]


def _call(entry: str) -> Mapping[str, Any]:
    function = {"name": "look", "arguments": json.dumps({"entry": entry})}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
