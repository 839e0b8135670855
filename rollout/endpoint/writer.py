"""Who writes the replies of an attempt: the engine, a teacher, or whoever is on record."""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from configs.plugins import failure
from envs.types import Task, ToolCall
from rollout.chat import ChatFormat
from rollout.endpoint.messages import Said, call_text, openai_assistant
from rollout.endpoint.request import Asked
from rollout.engines.engine import Engine, EngineError, GenerationRequest
from rollout.engines.wrappers import stream_seed
from rollout.types import Completion, Turn

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

Message = Mapping[str, object]
Teach = Callable[[Task, list[Message], list[Message]], Awaitable[object]]
"""A reply, as a text or a message of OpenAI's chat protocol, to these messages with these tools."""


class WriterError(RuntimeError):
    """There is no reply; the message says whose fault that is. `status` and `code` are what the client is told."""

    status = 503
    code = "engine_failed"


class ReplayError(WriterError):
    """The agent does not repeat the attempt that it is to go on from. Asking again does not help."""

    status = 422
    code = "not_repeated"


class Writer(Protocol):
    @property
    def by_engine(self) -> bool:
        """Whether an engine writes, whose time is not the agent's. That it works, its heartbeat tells."""
        ...

    async def write(self, asked: Asked, prompt_token_ids: tuple[int, ...], max_tokens: int) -> Completion:
        """Raises WriterError, and ValueError for what cannot be asked."""
        ...

    def release(self) -> None:
        """Nothing more is asked."""
        ...


@dataclass(frozen=True, slots=True)
class EngineWriter:
    """Samples with the policy."""

    engine: Engine
    trajectory_id: str
    temperature: float

    @property
    def by_engine(self) -> bool:
        return True

    async def write(self, asked: Asked, prompt_token_ids: tuple[int, ...], max_tokens: int) -> Completion:
        try:
            return await self.engine.generate(
                GenerationRequest(
                    trajectory_id=self.trajectory_id,
                    prompt_token_ids=prompt_token_ids,
                    max_tokens=max_tokens,
                    temperature=self.temperature,
                    grammar=asked.grammar,
                    seed=None if asked.seed is None else stream_seed(self.trajectory_id, asked.seed),
                    stop=asked.stop,
                )
            )
        except EngineError as error:
            raise WriterError(f"the engine failed: {error}") from error

    def release(self) -> None:
        self.engine.release(self.trajectory_id)


def engine_writers(engine: Engine, temperature: float) -> Callable[[Task, str], Writer]:
    """The policy replies in every attempt."""
    return lambda task, trajectory_id: EngineWriter(engine, trajectory_id=trajectory_id, temperature=temperature)


class ReplayWriter:
    """Repeats the first replies of an attempt to the calls that asked for them, and leaves all others to a writer.

    A call is known by its prompt and its grammar, not by its place: calls made side by side come in any order. Until
    the writer has said something new, an agent can only ask what the attempt asked, each call once; one that asks
    something else has another state, and nothing more is said to it.
    """

    def __init__(self, writer: Writer, turns: Sequence[Turn], num_turns: int) -> None:
        """`turns` are those of the attempt, the first `num_turns` of which are repeated."""
        self._writer = writer
        self._repeated = list(turns[:num_turns])
        self._followed = list(turns[num_turns:])
        self._all_repeats = True
        self._difference: str | None = None

    @property
    def by_engine(self) -> bool:
        return self._writer.by_engine

    async def write(self, asked: Asked, prompt_token_ids: tuple[int, ...], max_tokens: int) -> Completion:
        self._check()
        if turn := _take(self._repeated, asked, prompt_token_ids):
            return turn.completion
        if self._all_repeats and _take(self._followed, asked, prompt_token_ids) is None:
            self._difference = self._told(prompt_token_ids)
            self._check()
        completion = await self._writer.write(asked, prompt_token_ids, max_tokens)
        # Else a turn of an attempt that was refused meanwhile would look like that of a fork.
        self._check()
        self._all_repeats = False
        return completion

    def release(self) -> None:
        self._writer.release()

    def _check(self) -> None:
        """Raises ReplayError."""
        if self._difference is not None:
            raise ReplayError(self._difference)

    def _told(self, prompt: tuple[int, ...]) -> str:
        left = [turn.prompt_token_ids for turn in (*self._repeated, *self._followed)]
        same = max((_num_shared(prompt, one) for one in left), default=0)
        return (
            "the agent does not repeat the attempt that it goes on from: this prompt is as recorded in the first "
            f"{same} of its {len(prompt)} tokens; what it asks, and in which form, must follow from the task and the "
            "replies alone"
        )


def _take(turns: list[Turn], asked: Asked, prompt: tuple[int, ...]) -> Turn | None:
    """The first that this call asks for; it is then no longer among them."""
    found = (turn for turn in turns if (turn.prompt_token_ids, turn.grammar) == (prompt, asked.grammar))
    turn = next(found, None)
    if turn is not None:
        turns.remove(turn)
    return turn


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@dataclass(frozen=True, slots=True)
class TeacherWriter:
    """Asks a function of one's own what the policy should say."""

    teach: Teach
    name: str
    task: Task
    chat: ChatFormat

    @property
    def by_engine(self) -> bool:
        return False

    async def write(self, asked: Asked, prompt_token_ids: tuple[int, ...], max_tokens: int) -> Completion:
        tools: list[Message] = [{"type": "function", "function": json.loads(tool)} for tool in asked.tools]
        try:
            reply = await self.teach(self.task, openai_messages(asked.messages), tools)
        except Exception as error:
            raise WriterError(f"the teacher '{self.name}' failed with {failure(error)}") from error
        try:
            return completion_of(reply_text(reply), asked, self.chat, max_tokens)
        except ValueError as error:
            raise WriterError(f"what the teacher '{self.name}' replied to {self.task.id} {error}") from error

    def release(self) -> None:
        """A function keeps nothing for an attempt."""


class RecordedWriter:
    """Repeats recorded messages of the assistant, one a call."""

    def __init__(self, replies: Iterable[Mapping[str, object]], chat: ChatFormat) -> None:
        self._replies = iter(replies)
        self._chat = chat

    @property
    def by_engine(self) -> bool:
        return False

    async def write(self, asked: Asked, prompt_token_ids: tuple[int, ...], max_tokens: int) -> Completion:
        try:
            return completion_of(reply_text(next(self._replies)), asked, self._chat, max_tokens)
        except ValueError as error:
            raise WriterError(f"the assistant's message {error}") from error

    def release(self) -> None:
        """A record keeps nothing for an attempt."""


def completion_of(text: str, asked: Asked, chat: ChatFormat, max_tokens: int) -> Completion:
    """A text as if the policy had sampled it. Raises ValueError where the policy could not, for the end of a
    sentence."""
    if asked.grammar is not None and not _follows(text, asked.grammar, whole=True):
        text = _respelled(text)
    cuts = [(start + len(stop), start) for stop in asked.stop if (start := text.find(stop)) >= 0]
    end, kept = min(cuts, default=(len(text), len(text)))
    token_ids = chat.encode_completion(text[:end])
    token_ids = token_ids[:-1] if cuts else token_ids
    if len(token_ids) > max_tokens:
        raise ValueError(
            f"has {len(token_ids)} tokens, and the policy may write {max_tokens}; shorten it, or raise "
            "rollout.max_turn_tokens"
        )
    if asked.grammar is not None and not _follows(text[:end], asked.grammar, whole=not cuts):
        raise ValueError(f"is not what the request demands by tool_choice or response_format: {text!r:.200}")
    return Completion(
        token_ids=token_ids,
        logprobs=(0.0,) * len(token_ids),
        text=text[:kept],
        finish_reason="stop",
        policy_version=0,
    )


def _respelled(text: str) -> str:
    """JSON with the white space that every grammar has; any other text as it is."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def reply_text(reply: object) -> str:
    """A reply as the policy would write it; `reply` is a text, or a message of OpenAI's chat protocol as a table or as
    its client's object. Raises ValueError, for the end of a sentence."""
    if isinstance(reply, str):
        return reply
    dump = getattr(reply, "model_dump", None)
    message = dump() if callable(dump) else reply
    if not isinstance(message, Mapping) or message.get("role", "assistant") != "assistant":
        raise ValueError(f"must be a text or a message of the assistant, got a {type(reply).__name__}")
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise ValueError(f"must have a text as content, got a {type(content).__name__}")
    return "\n".join(part for part in (content, *map(_replied_call, message.get("tool_calls") or ())) if part)


def _replied_call(call: object) -> str:
    match call:
        case {"function": {"name": str(name), "arguments": str(text)}}:
            with suppress(ValueError):
                return call_text(ToolCall(name=name, arguments=json.dumps(json.loads(text), ensure_ascii=False)))
    raise ValueError("must call functions by a name and arguments as JSON")


def openai_messages(messages: Sequence[Said]) -> list[Message]:
    """The messages of a request as OpenAI's chat protocol has them. Results belong to the open calls in their order."""
    found: list[Message] = []
    open_calls: list[str] = []
    for said in messages:
        if said.role == "assistant":
            open_calls = [f"call_{len(found)}_{index}" for index in range(len(said.calls))]
            found.append(openai_assistant(said, open_calls))
        elif said.role == "tool":
            own_id = open_calls.pop(0) if open_calls else "call_unknown"
            found.append({"role": "tool", "tool_call_id": own_id, "content": said.content})
        else:
            found.append({"role": said.role, "content": said.content})
    return found


def _follows(text: str, grammar: str, *, whole: bool) -> bool:
    """A text that is not `whole` is the beginning of one."""
    from xgrammar import GrammarMatcher

    matcher = GrammarMatcher(_compiled(grammar))
    return bool(matcher.accept_string(text) and (not whole or matcher.is_completed()))


@lru_cache(maxsize=64)
def _compiled(grammar: str) -> "CompiledGrammar":
    """For texts, whatever their tokens."""
    from xgrammar import GrammarCompiler, TokenizerInfo

    return GrammarCompiler(TokenizerInfo([])).compile_grammar(grammar)
