"""An agent that answers in one call, the questions it is asked, and a teacher that knows their answers."""

import json
from pathlib import Path


async def solve(task, client):
    """Answer a task. `client` is an openai.AsyncOpenAI."""
    messages = [{"role": "user", "content": task.question}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return reply.choices[0].message.content


def tasks():
    """Return the rows of questions.jsonl: half for training, half held out."""
    lines = Path(__file__).with_name("questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def teach(task, messages, tools):
    """Return the first accepted answer, so that the policy learns the form of an answer before RL."""
    return task.answer.splitlines()[0]
