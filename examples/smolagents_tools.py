r"""A ToolCallingAgent of smolagents: every reply must call a tool, and the last call is the answer.

    agentflow train examples/agents.toml name=smolagents agent.function=smolagents_tools:solve \
        cold_start.function=smolagents_tools:teach rollout.engine.max_model_len=2048 learner.microbatch_tokens=2048

smolagents is synchronous, so `solve` is a plain function. It rewrites earlier calls as text of the assistant, so each
reply starts a new branch; its own prompt has 1,200 tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import teacher
from openai import OpenAI
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

from envs.types import Task
from ray_jobs.starter import warehouse
from rollout.agent.custom import GivenTask

OBSERVED = "Observation:\n"


@tool
def article_of(order: str) -> str:
    """Return the article of an order.

    Args:
        order: The number of the order.
    """
    return warehouse.article_of(order)


@tool
def shelf_of(article: str) -> str:
    """Return the shelf of an article.

    Args:
        article: The name of the article.
    """
    return warehouse.shelf_of(article)


def solve(task: GivenTask, client: OpenAI) -> str:
    model = OpenAIModel("policy", client=client)
    clerk = ToolCallingAgent([article_of, shelf_of], model, max_steps=4, verbosity_level=LogLevel.OFF)
    return str(clerk.run(task.question)).strip()


async def teach(task: Task, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> object:
    """Demonstrate in the format of smolagents: results are user messages, the answer is a call."""
    results = [one["content"].removeprefix(OBSERVED) for one in messages if one["content"].startswith(OBSERVED)]
    said = await teacher.teach(task, [{"role": "tool", "content": result} for result in results], tools)
    return warehouse.call("final_answer", answer=said) if isinstance(said, str) else said
