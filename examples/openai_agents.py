"""An agent of openai-agents, which speaks OpenAI's Responses.

agentflow train examples/agents.toml name=openai-agents agent.function=openai_agents:solve
"""

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI

from ray_jobs.starter import warehouse
from rollout.agent.custom import GivenTask


@function_tool
def article_of(order: str) -> str:
    return warehouse.article_of(order)


@function_tool
def shelf_of(article: str) -> str:
    return warehouse.shelf_of(article)


CLERK = Agent(name="clerk", model="policy", tools=[article_of, shelf_of])


async def solve(task: GivenTask, client: AsyncOpenAI) -> str:
    run = RunConfig(model_provider=OpenAIProvider(openai_client=client), tracing_disabled=True)
    try:
        result = await Runner.run(CLERK, task.question, max_turns=4, run_config=run)
    except (MaxTurnsExceeded, ModelBehaviorError):
        return ""  # an error of the model, so the answer is wrong; any other error counts as wrong, too
    return str(result.final_output).strip()
