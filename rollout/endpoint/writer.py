"""Sources of an attempt's replies: an engine, or a teacher."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from configs.plugins import failure
from envs.types import Task, ToolCall
from rollout.chat import THOUGHTS, ChatFormat
from rollout.endpoint.messages import ChatMessage, RequestError, call_text, openai_assistant, plain_text
from rollout.endpoint.request import ModelRequest
from rollout.engines.engine import Engine, EngineError, GenerationRequest
from rollout.engines.wrappers import stream_seed
from rollout.types import Completion

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

Message = Mapping[str, object]
Teach = Callable[[Task, list[Message], list[Message]], Awaitable[object]]
"""Returns a reply to these messages with these tools: a text, or a message of OpenAI's chat protocol."""


@dataclass(frozen=True)
class EngineWriter:
    """Samples replies with the policy."""

    engine: Engine
    trajectory_id: str
    temperature: float

    async def write(self, request: ModelRequest, prompt_token_ids: tuple[int, ...], max_tokens: int) -> Completion:
        """Write a reply. Raises RequestError, and ValueError for an invalid request."""
        try:
            return await self.engine.generate(
                GenerationRequest(
                    trajectory_id=self.trajectory_id,
                    prompt_token_ids=prompt_token_ids,
                    max_tokens=max_tokens,
                    temperature=self.temperature,
                    grammar=request.grammar,
                    seed=None if request.seed is None else stream_seed(self.trajectory_id, request.seed),
                    stop=request.stop,
                )
            )
        except EngineError as error:
            raise RequestError(f"the engine failed: {error}", status=503, code="engine_failed") from error


@dataclass(frozen=True)
class TeacherWriter:
    """Calls a custom teacher function for each reply."""

    teach: Teach
    name: str
    task: Task
    chat: ChatFormat

    async def write(self, request: ModelRequest, prompt_token_ids: tuple[int, ...], max_tokens: int) -> Completion:
        """Write a reply. Raises RequestError."""
        tools: list[Message] = [{"type": "function", "function": json.loads(tool)} for tool in request.tools]
        try:
            reply = await self.teach(self.task, openai_messages(request.messages), tools)
        except Exception as error:
            raise RequestError(f"{self.name} failed with {failure(error)}", status=503) from None
        try:
            text = reply_text(reply)
            if not text.strip():
                raise ValueError("is empty")
            written = [mark for mark in THOUGHTS if mark in self.chat.pieces.generation]
            if text.lstrip().startswith(tuple(written)):
                raise ValueError(
                    f"begins with {written[0]}, which the model's chat template writes; leave the thoughts out"
                )
            return completion_of(text, request, self.chat, max_tokens)
        except ValueError as error:
            raise RequestError(f"the reply of {self.name} to {self.task.id} {error}", status=503) from error


Writer: TypeAlias = EngineWriter | TeacherWriter
"""The source of an attempt's replies."""


def engine_writers(engine: Engine, temperature: float) -> Callable[[Task, str], Writer]:
    """Return a function that creates the writer of an attempt, from its task and its trajectory's id."""
    return lambda task, trajectory_id: EngineWriter(engine, trajectory_id=trajectory_id, temperature=temperature)


def completion_of(text: str, request: ModelRequest, chat: ChatFormat, max_tokens: int) -> Completion:
    """Return a text as if the policy had sampled it.

    Raises ValueError if the policy could not have; the message completes a sentence about the text.
    """
    if request.grammar is not None and not _follows(text, request.grammar, whole=True):
        # Grammars allow JSON with one form of white space only.
        with suppress(ValueError, RecursionError):
            text = json.dumps(json.loads(text), ensure_ascii=False)
    elif chat.opens_thought and not any(end in text for end in THOUGHTS.values()):
        text = f"{THOUGHTS['<think>']}\n\n{text}"
    cuts = [(start + len(stop), start) for stop in request.stop if (start := text.find(stop)) >= 0]
    end, kept = min(cuts, default=(len(text), len(text)))
    token_ids = chat.encode_completion(text[:end])
    token_ids = token_ids[:-1] if cuts else token_ids
    if len(token_ids) > max_tokens:
        raise ValueError(
            f"has {len(token_ids)} tokens, and the policy may write {max_tokens}; shorten it, or raise "
            "rollout.max_turn_tokens"
        )
    if request.grammar is not None and not _follows(text[:end], request.grammar, whole=not cuts):
        raise ValueError(
            "does not follow the request's tool_choice or response_format, whose fields come in the schema's order: "
            f"{text!r:.200}"
        )
    return Completion(
        token_ids=token_ids,
        logprobs=(0.0,) * len(token_ids),
        text=text[:kept],
        finish_reason="stop",
        policy_version=0,
    )


def reply_text(reply: object) -> str:
    """Return a reply as the policy would write it.

    `reply` is a text, or a message of OpenAI's chat protocol as a mapping or as its client's object. Raises ValueError;
    the message completes a sentence about the reply.
    """
    if isinstance(reply, str):
        return reply
    dump = getattr(reply, "model_dump", None)
    message = dump() if callable(dump) else reply
    if not isinstance(message, Mapping) or message.get("role", "assistant") != "assistant":
        raise ValueError(f"must be a text or a message of the assistant, not a {type(reply).__name__}")
    try:
        parts = [plain_text(message.get("content"), "content")]
    except RequestError:
        raise ValueError("must have a text as content") from None
    for call in message.get("tool_calls") or ():
        try:
            function = call["function"]
            arguments = json.dumps(json.loads(function["arguments"] or "{}"), ensure_ascii=False)
            parts.append(call_text(ToolCall(name=function["name"], arguments=arguments)))
        except (LookupError, TypeError, ValueError):
            raise ValueError("must call functions by a name and arguments as JSON") from None
    return "\n".join(filter(None, parts))


def openai_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Return the messages in OpenAI's chat protocol; results are matched with the open calls in order."""
    written: list[Message] = []
    open_calls: list[str] = []
    for message in messages:
        if message.role == "assistant":
            open_calls = [f"call_{len(written)}_{index}" for index in range(len(message.calls))]
            written.append(openai_assistant(message, open_calls))
        elif message.role == "tool":
            call_id = open_calls.pop(0) if open_calls else "call_unknown"
            written.append({"role": "tool", "tool_call_id": call_id, "content": message.content})
        else:
            written.append({"role": message.role, "content": message.content})
    return written


def _follows(text: str, grammar: str, *, whole: bool) -> bool:
    from xgrammar import GrammarMatcher

    matcher = GrammarMatcher(_compiled(grammar))
    return bool(matcher.accept_string(text) and (not whole or matcher.is_completed()))


@lru_cache(maxsize=64)
def _compiled(grammar: str) -> "CompiledGrammar":
    from xgrammar import GrammarCompiler, TokenizerInfo

    # An empty vocabulary, because only texts are matched.
    return GrammarCompiler(TokenizerInfo([])).compile_grammar(grammar)
