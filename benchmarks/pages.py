"""An agent of openai-agents whose tasks take one, three or six calls: each page names the next.

    "What is the price of lot 4711?"    look("lot 4711") -> "crate 2954"
                                        look("crate 2954") -> "shelf 8120"
                                        look("shelf 8120") -> "price 17"
                                        "17"

At each page without the price the teacher gives up in `GIVES_UP` of the tasks. So all of its demonstrations of one call
are right, 4% of those of three calls and 0.03% of those of six, although each decision is made in at least a fifth.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from envs.types import Task
    from rollout.agent.custom import GivenTask

SIZES = {"train": 1000, "eval": 100, "demonstrations": 256, "prm": 200}
"""Tasks of each split and number of calls; no two tasks share a page."""
SPLITS = [split for split, size in SIZES.items() for _ in range(size)]
GIVES_UP = 0.8
KINDS = ("lot", "crate", "shelf", "room", "house", "street")


def _tasks(num_calls: int) -> Iterator[Mapping[str, Any]]:
    """Yield the tasks that take so many calls; the same ones at every call."""
    rng = random.Random(num_calls)
    columns = [rng.sample(range(1000 + num_calls % 4, 10000, 4), len(SPLITS)) for _ in range(num_calls)]
    for split, *numbers in zip(SPLITS, *columns, strict=True):
        path = [f"{kind} {number}" for kind, number in zip(KINDS, numbers, strict=False)]
        answer = str(rng.randrange(10, 100))
        yield {"question": f"What is the price of {path[0]}?", "answer": answer, "path": path, "split": split}


one, three, six = (partial(_tasks, num_calls) for num_calls in (1, 3, 6))
PAGES = {
    entry: page
    for task in (*one(), *three(), *six())
    for entry, page in zip(task["path"], (*task["path"][1:], f"price {task['answer']}"), strict=True)
}
"""All that can be looked up."""
MAX_TURNS = 8


def page_of(entry: str) -> str:
    return PAGES.get(entry, "no such entry")


READER = Agent(name="reader", model="policy", tools=[function_tool(page_of, name_override="look")])


async def solve(task: "GivenTask", client: "AsyncOpenAI") -> str:
    run = RunConfig(model_provider=OpenAIProvider(openai_client=client), tracing_disabled=True)
    try:
        return str((await Runner.run(READER, task.question, max_turns=MAX_TURNS, run_config=run)).final_output).strip()
    except (MaxTurnsExceeded, ModelBehaviorError):
        return ""


def score(task: "Task", answer: str) -> float:
    return float(answer == task.answer)


async def teach(task: "Task", messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> object:
    """Look up the pages of a task, and at each of them give up in most of the tasks."""
    path, done = task.metadata["path"], sum(one["role"] == "tool" for one in messages)
    if done == len(path):
        return task.answer
    if done and random.Random(f"{task.id} {done}").random() < GIVES_UP:
        return "unknown"
    function = {"name": "look", "arguments": json.dumps({"entry": path[done]})}
    return {"role": "assistant", "tool_calls": [{"id": str(done), "type": "function", "function": function}]}


def grade(question: str) -> float:
    """Return a judge's score of the last reply of a step's text: whether it follows from what was just heard.

    It knows neither the path nor the answer. One verdict in ten is the opposite of that.
    """
    before, _, reply = question.partition("</step>")[0].rpartition("\nReply: ")
    heard = re.findall(rf"\b({'|'.join((*KINDS, 'price'))}) (\d+)", before.rpartition("Heard: ")[2])
    kind, number = heard[-1] if heard else ("", "")
    is_right = reply.strip() == number if kind == "price" else f'"{kind} {number}"' in reply
    return float(is_right != (random.Random(question).random() < 0.1))
