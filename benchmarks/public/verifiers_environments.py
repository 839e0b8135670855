"""Two environments of the verifiers library, by name and arguments, as recipes name them."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs.types import Task
from rollout.agent.verifiers import VerifiersEnvironment

HERE = {"harness": {"id": "chat-loop"}}
_REVERSING = VerifiersEnvironment(
    "reverse-text", evaluation={"split": "eval"}, num_taught=96, environment={"agent": HERE}
)
_GUESSING = VerifiersEnvironment("guess-number", environment={"player": HERE})

reverse_tasks, reverse, reverse_score = _REVERSING.tasks, _REVERSING.solve, _REVERSING.score
guess_tasks, guess, guess_score = _GUESSING.tasks, _GUESSING.solve, _GUESSING.score


async def teach_to_reverse(
    task: Task, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> str:
    return str(messages[-1]["content"]).rpartition(": ")[2][::-1]


async def teach_to_guess(task: Task, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Any number of those that the prompt allows, whatever was said since: that hints pay is for RL to find out."""
    lowest, highest = map(int, re.findall(r"[0-9]+", str(messages[0]["content"])))
    return str(random.Random(f"{task.id} {len(messages)}").randint(lowest, highest))
