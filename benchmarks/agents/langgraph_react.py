"""The warehouse's clerk as langgraph's prebuilt ReAct agent over langchain-openai, which speaks Chat Completions.

agentflow train benchmarks/agents/recipe.toml
"""

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from langsmith import tracing_context
from openai import AsyncOpenAI
from rollout.agent.own import GivenTask

from ray_jobs.commands.starter import warehouse


def article_of(order: str) -> str:
    """The article of an order."""
    return warehouse.article_of(order)


def shelf_of(article: str) -> str:
    """The shelf of an article."""
    return warehouse.shelf_of(article)


async def solve(task: GivenTask, client: AsyncOpenAI) -> str:
    model = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key)
    clerk = create_react_agent(model, [article_of, shelf_of])
    with tracing_context(enabled=False):
        result = await clerk.ainvoke({"messages": [("user", task.question)]}, {"recursion_limit": 8})
    return result["messages"][-1].text.strip()
