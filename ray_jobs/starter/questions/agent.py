"""An agent that answers in one call, and a teacher that knows the answers."""


async def solve(task, client):
    """Answer a task. `client` is an openai.AsyncOpenAI."""
    messages = [{"role": "user", "content": task.question}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return reply.choices[0].message.content


def teach(task, messages, tools):
    """Return the first accepted answer, so that the policy learns the form of an answer before RL."""
    return task.answer.splitlines()[0]
