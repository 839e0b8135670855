"""The agent that is trained, written as for any model behind OpenAI's protocol; `client` is an `openai.AsyncOpenAI`."""

import json

from warehouse import article_of, shelf_of

FUNCTIONS = {"article_of": article_of, "shelf_of": shelf_of}


def described(name, argument):
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [described("article_of", "order"), described("shelf_of", "article")]


async def solve(task, client):
    messages = [{"role": "user", "content": task.question}]
    for _ in range(4):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content.strip()
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result_of(call.function)})
    return ""  # no answer after four calls: wrong, not broken


def result_of(function):
    try:
        return FUNCTIONS[function.name](**json.loads(function.arguments))
    except (KeyError, TypeError, ValueError):
        return "no such function, or wrong arguments"
