"""Demonstrations for a custom agent: a teacher's replies, or recorded conversations."""

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from configs.errors import UserError
from configs.learner import ColdStartConfig, FileConfig, TeacherConfig
from configs.plugins import in_a_thread, own_function
from envs.types import Task
from rollout.chat import ChatFormat
from rollout.endpoint.attempt import Attempt
from rollout.endpoint.chat_completions import read, read_messages
from rollout.endpoint.messages import RequestError
from rollout.endpoint.request import Rules
from rollout.endpoint.writer import Message, Teach, TeacherWriter
from rollout.types import Trajectory

OWN_ID = "demonstration/{}"
GROUP_ID = "demonstrations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages and tools of OpenAI's chat protocol."""

    place: str
    """File and line."""
    messages: Sequence[Message]
    tools: Sequence[Message]

    def said_by_users(self) -> list[str]:
        return [one.content for one in read_messages(self.messages) if one.role == "user"]


def load_teacher(config: TeacherConfig) -> Teach:
    """Load a teacher function; a plain function is called in a thread. Raises OwnCodeError."""
    function = own_function(config.function, key="cold_start.function", takes="task, messages, tools")
    if inspect.iscoroutinefunction(function):
        return function

    async def teach(*arguments: object) -> object:
        reply = await in_a_thread(function, *arguments)
        # A plain function may return the coroutine of an async one.
        return await reply if inspect.isawaitable(reply) else reply

    return teach


def read_conversations(path: str) -> list[Conversation]:
    """Read a file with one conversation per line, as JSON. Raises UserError."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cold_start.path = '{path}' cannot be read: {error}") from None
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not filled:
        raise UserError(f"cold_start.path = '{path}' contains no conversation; write one JSON object per line")
    return [_conversation(line, f"{path}, line {number}") for number, line in filled]


def _conversation(line: str, place: str) -> Conversation:
    try:
        row = json.loads(line)
        messages, tools = row["messages"], row.get("tools") or []
        said = read_messages(messages)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RequestError) as error:
        raise UserError(f"{place}: must be an object with 'messages': {error}") from None
    for index, message in enumerate(messages):
        if message.get("weight") not in (None, 0, 1):
            raise UserError(f"{place}: messages[{index}].weight must be 0 or 1, got {message['weight']!r:.80}")
        if _is_imitated(message) and not (index and _text_of(message)):
            raise UserError(f"{place}: messages[{index}] is empty or replies to nothing; delete it or give it weight 0")
    if not any(map(_is_imitated, messages)):
        raise UserError(f"{place}: has no message of the assistant with a weight other than 0 to imitate")
    if not tools and any(one.calls for one in said):
        raise UserError(f"{place}: has function calls but no 'tools'")
    return Conversation(place=place, messages=messages, tools=tools)


def _text_of(message: Message) -> str:
    return read_messages([message])[0].text.strip()


def _is_imitated(message: Message) -> bool:
    # Messages of weight 0 are only context, as in OpenAI's fine-tuning.
    return bool(message["role"] == "assistant" and message.get("weight") != 0)


def check_demonstrations(config: ColdStartConfig) -> None:
    """Check that a recipe's demonstrations can be loaded. Raises UserError."""
    if isinstance(config, TeacherConfig):
        load_teacher(config)
    elif isinstance(config, FileConfig):
        read_conversations(config.path)


async def recorded_trajectory(conversation: Conversation, number: int, chat: ChatFormat, rules: Rules) -> Trajectory:
    """Return a conversation as if the policy had written the assistant's messages. Raises UserError."""
    messages = conversation.messages
    first = next((index for index, one in enumerate(messages) if one["role"] == "user"), 0)
    # A greeting or an empty reply that is not imitated is context alone.
    replied = (index > first and one["role"] == "assistant" and _text_of(one) for index, one in enumerate(messages))
    places = [index for index, is_reply in enumerate(replied) if is_reply or _is_imitated(messages[index])]
    question = next(iter(conversation.said_by_users()), "")
    task = Task(id=conversation.place, dataset="recorded", question=question, answer="")
    replies = iter([messages[index] for index in places])

    async def repeat(*_: object) -> object:
        return next(replies)

    attempt = Attempt(TeacherWriter(repeat, "the file", task, chat), chat, rules)
    try:
        for index in places:
            body = {"model": rules.model, "messages": messages[:index], "tools": conversation.tools}
            call = await attempt.call(read(body, attempt))
            await call.answered()
            call.delivered = True
    except RequestError as error:
        raise UserError(f"{conversation.place}: {error}") from None
    finally:
        turns = await attempt.end()
    imitated = [_is_imitated(messages[index]) for index in places]
    answer = turns[-1].text
    return Trajectory(
        id=OWN_ID.format(number),
        group_id=GROUP_ID,
        task=replace(task, answer=answer),
        turns=tuple(structs.replace(turn, trainable=one) for turn, one in zip(turns, imitated, strict=True)),
        answer=answer,
        stop_reason="answered",
    )
