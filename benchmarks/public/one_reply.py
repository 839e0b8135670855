"""An agent that asks once and answers with what the model says; and its teacher, who knows the answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI
from rollout.agent.own import GivenTask

from envs.types import Task


async def solve(task: GivenTask, client: AsyncOpenAI) -> str:
    messages = [{"role": "user", "content": task.question}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return (reply.choices[0].message.content or "").strip()


async def teach(task: Task, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    return task.answer
