"""The agent of `benchmarks.pages` with langgraph (prebuilt ReAct) in place of openai-agents."""

from typing import TYPE_CHECKING

from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent
from langsmith import tracing_context

from benchmarks.pages import MAX_TURNS, page_of

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from rollout.agent.custom import GivenTask


def look(entry: str) -> str:
    """Return a page."""
    return page_of(entry)


async def solve(task: "GivenTask", client: "AsyncOpenAI") -> str:
    model = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key)
    reader = create_react_agent(model, [look])
    try:
        with tracing_context(enabled=False):
            # A turn and the call after it are two steps of the graph.
            result = await reader.ainvoke({"messages": [("user", task.question)]}, {"recursion_limit": 2 * MAX_TURNS})
    except GraphRecursionError:
        return ""
    return result["messages"][-1].text.strip()
