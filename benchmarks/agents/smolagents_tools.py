r"""The warehouse's clerk as a ToolCallingAgent of smolagents: every reply must call, and the last call is the answer.

    agentflow train benchmarks/agents/recipe.toml name=smolagents \
        agent.function=benchmarks.agents.smolagents_tools:solve \
        cold_start.function=benchmarks.agents.smolagents_tools:teach \
        rollout.engine.max_model_len=2048 learner.microbatch_tokens=2048

smolagents waits for each reply, so `solve` is a plain function. What was called stands in the next prompt as words of
the assistant, so each reply is a branch; its own prompt has 1,200 tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from openai import OpenAI
from rollout.agent.own import GivenTask
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

from benchmarks.agents import teacher
from envs.types import Task
from ray_jobs.commands.starter import warehouse

OBSERVED = "Observation:\n"


@tool
def article_of(order: str) -> str:
    """The article of an order.

    Args:
        order: Its number.
    """
    return warehouse.article_of(order)


@tool
def shelf_of(article: str) -> str:
    """The shelf of an article.

    Args:
        article: Its name.
    """
    return warehouse.shelf_of(article)


def solve(task: GivenTask, client: OpenAI) -> str:
    model = OpenAIModel("policy", client=client)
    clerk = ToolCallingAgent([article_of, shelf_of], model, max_steps=4, verbosity_level=LogLevel.OFF)
    return str(clerk.run(task.question)).strip()


async def teach(task: Task, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> object:
    """In the way of smolagents: results are the user's words, an answer is a call."""
    results = [one["content"].removeprefix(OBSERVED) for one in messages if one["content"].startswith(OBSERVED)]
    said = await teacher.teach(task, [{"role": "tool", "content": result} for result in results], tools)
    return warehouse.call("final_answer", answer=said) if isinstance(said, str) else said
