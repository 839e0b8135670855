"""An agent of langgraph (prebuilt ReAct over langchain-openai), which speaks Chat Completions.

agentflow train examples/agents.toml
"""

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from langsmith import tracing_context
from openai import AsyncOpenAI

from ray_jobs.starter import warehouse
from rollout.agent.custom import GivenTask


def article_of(order: str) -> str:
    """Return the article of an order."""
    return warehouse.article_of(order)


def shelf_of(article: str) -> str:
    """Return the shelf of an article."""
    return warehouse.shelf_of(article)


async def solve(task: GivenTask, client: AsyncOpenAI) -> str:
    model = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key)
    clerk = create_react_agent(model, [article_of, shelf_of])
    with tracing_context(enabled=False):
        result = await clerk.ainvoke({"messages": [("user", task.question)]}, {"recursion_limit": 8})
    return result["messages"][-1].text.strip()
