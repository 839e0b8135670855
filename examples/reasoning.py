"""A family of reasoning-gym, small enough for a model of 135M parameters, and an agent that asks once."""

from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI

from envs.datasets.reasoning_gym import ReasoningGym
from envs.types import Task
from rollout.agent.custom import GivenTask

_REVERSALS = ReasoningGym("word_sequence_reversal", num_tasks=3000, seed=1, min_words=2, max_words=4)
tasks, score = _REVERSALS.tasks, _REVERSALS.score


async def solve(task: GivenTask, client: AsyncOpenAI) -> str:
    """Answer with the reply of the model."""
    messages: Any = [{"role": "user", "content": task.question}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return (reply.choices[0].message.content or "").strip()


async def teach(task: Task, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    return task.answer
