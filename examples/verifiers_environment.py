"""The taskset `reverse_text` of the verifiers library as tasks, agent and scorer of a recipe."""

from collections.abc import Mapping, Sequence
from typing import Any

from envs.types import Task
from rollout.agent.verifiers import VerifiersEnvironment

_REVERSING = VerifiersEnvironment(
    "reverse-text",
    evaluation={"split": "eval"},
    num_taught=96,
    environment={"agent": {"harness": {"id": "chat-loop"}}},
)
tasks, solve, score = _REVERSING.tasks, _REVERSING.solve, _REVERSING.score


async def teach(task: Task, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    return str(messages[-1]["content"]).rpartition(": ")[2][::-1]
