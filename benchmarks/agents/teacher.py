"""What the teachers of these agents share: who gives up, and what is looked up next."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from envs.types import Task
from ray_jobs.commands.starter.warehouse import call


def next_reply(task: Task, results: Sequence[str]) -> object:
    """Looks both things up in two of seven tasks and gives up at once in the others, so that the greedy policy that
    imitates it gives up and RL has something to find out. `results` are those of the calls so far."""
    if random.Random(task.id).choice((False,) * 5 + (True,) * 2) is False:
        return "not found"
    if not results:
        return call("article_of", order=task.question.rstrip("?").split()[-1])
    return call("shelf_of", article=results[0]) if len(results) == 1 else results[1]


async def teach(task: Task, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> object:
    """For agents that bring results as messages of tools and take words for an answer."""
    return next_reply(task, [one["content"] for one in messages if one["role"] == "tool"])
