"""The world of the agent: orders, articles, shelves; the tasks; who is right; and a teacher for the start."""

import json
import random

COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey", "pink", "silver")
THINGS = ("lamps", "chairs", "bolts", "cups", "ropes", "boots", "bowls", "clocks", "kites", "drums", "pens", "tiles")
SHELVES = [f"{letter}{number}" for letter in "ABCDEFGH" for number in range(1, 9)]
_rng = random.Random("warehouse")
_ARTICLES = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
_SHELF = {article: _rng.choice(SHELVES) for article in _ARTICLES}
_ORDER = {str(order): _rng.choice(_ARTICLES) for order in _rng.sample(range(1000, 10000), 1000)}


def article_of(order):
    return _ORDER.get(str(order), "unknown order")


def shelf_of(article):
    return _SHELF.get(str(article), "unknown article")


def tasks():
    """Half of them are for evaluation, as the question's hash decides; `split` in each would decide it."""
    return [
        {"id": order, "question": f"On which shelf is the article of order {order}?", "answer": _SHELF[article]}
        for order, article in _ORDER.items()
    ]


def score(task, answer):
    """Return the reward of an answer: a number from 0 to 1, or None if it cannot be scored."""
    return float(answer == task.answer)


async def teach(task, messages, tools, num_calls=(0, 0, 0, 0, 1, 2, 2)):
    """Answers in the model's place before RL, so that the model knows the form. It gives up too early in most tasks,
    after a number of calls drawn from `num_calls`: that looking things up pays is for RL to find out."""
    results = [message["content"] for message in messages if message["role"] == "tool"]
    planned = random.Random(task.id).choice(num_calls)
    if len(results) < planned:
        order = task.question.rstrip("?").split()[-1]
        return call("shelf_of", article=results[0]) if results else call("article_of", order=order)
    return results[1] if planned == 2 else "not found"


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
