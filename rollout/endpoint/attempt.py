"""One attempt of a custom agent, as the endpoint sees it: each model call becomes one turn of the record."""

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from envs.types import ToolCall, ToolResult
from rollout.chat import ChatFormat, ChatTemplateError
from rollout.endpoint.messages import ChatMessage, RequestError, read_reply, turns_of
from rollout.endpoint.request import ModelRequest, Rules
from rollout.endpoint.writer import Writer, WriterError
from rollout.time_limit import TimeLimit
from rollout.types import Completion, Turn


def attempt_ended() -> RequestError:
    return RequestError(
        "this attempt has ended and is scored already; later calls do not count", status=403, code="attempt_ended"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of a call."""

    token_ids: tuple[int, ...]
    parent: "Call | None"
    """The call whose reply this prompt continues."""
    tail: tuple[ChatMessage, ...]
    """The messages since that reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A sampled reply."""

    id: str
    number: int
    """Number of its call in the attempt, from 0."""
    created: int
    num_prompt_tokens: int
    completion: Completion
    message: ChatMessage
    """The completion's text as a message."""
    stopped_at: str | None
    """The request's stop text that ended it."""

    @property
    def call_names(self) -> tuple[str, ...]:
        """Names of its function calls, unique in an attempt.

        They are the same in every attempt that takes the same course, because agents may write them into prompts.
        """
        return tuple(f"{self.number}_{index}" for index in range(len(self.message.calls)))


class Call:
    """One model call of an attempt."""

    answering: "asyncio.Task[Reply]"

    def __init__(self, request: ModelRequest, prompt: Prompt, *, number: int) -> None:
        self.request = request
        self.prompt = prompt
        self.number = number
        self.conversation: tuple[ChatMessage, ...] = ()
        """The request's messages and the reply, once it is sampled."""
        self.delivered = False
        """The client received the complete reply."""
        self.left = False
        """The client disconnected before that."""
        self.tool_result: ToolResult | None = None
        self.generate_s = 0.0
        self.tool_s = 0.0

    async def reply(self) -> Reply:
        """Wait for the reply. Sampling continues if the caller is cancelled. Raises RequestError."""
        try:
            return await asyncio.shield(self.answering)
        except asyncio.CancelledError:
            if self.answering.cancelled():
                raise attempt_ended() from None
            raise

    def answered(self) -> Reply | None:
        """Return the reply if it is sampled already."""
        if not self.answering.done() or self.answering.cancelled() or self.answering.exception():
            return None
        return self.answering.result()

    def turn(self) -> Turn | None:
        """Return the turn, or None if nothing was sampled.

        A reply that never reached the agent did not influence it, so it is not trained on.
        """
        reply = self.answered()
        if reply is None:
            return None
        calls = reply.message.calls
        call = None
        if calls:
            arguments = "\n".join(one.arguments for one in calls)
            call = ToolCall(name=", ".join(one.name for one in calls), arguments=arguments)
        tools = self.request.tools if self.prompt.parent is None else ()
        return Turn.of(
            role="planner",
            prompt_token_ids=self.prompt.token_ids,
            completion=reply.completion,
            trainable=self.delivered,
            grammar=self.request.grammar,
            thought=reply.message.content if calls else "",
            tool_call=call,
            tool_result=self.tool_result,
            heard="\n".join(f"{one.role}: {one.content}" for one in turns_of(self.prompt.tail, tools)),
            generate_s=round(self.generate_s, 4),
            tool_s=round(self.tool_s, 4),
        )


class Attempt:
    """The calls of one attempt, which carry its key."""

    def __init__(self, writer: Writer, chat: ChatFormat, rules: Rules, *, timeout_s: float | None = None) -> None:
        self.rules = rules
        self.limit = TimeLimit(timeout_s)
        self.key = f"attempt-{secrets.token_urlsafe(24)}"
        self.posted: str | None = None
        """The answer that was posted first."""
        self.answered = asyncio.Event()
        self.out_of_context: str | None = None
        """The message of the last call's rejection if its prompt filled the context."""
        self.broken: str | None = None
        """The reason if a reply could not be sampled."""
        self._writer = writer
        self._chat = chat
        self._calls: list[Call] = []
        self._replied: list[Call] = []
        """Calls in the order of their replies."""
        self._by_name: dict[str, Call] = {}
        self._num_sampling = 0
        self._idle_since: tuple[Call, float] | None = None
        """The call of the last reply, and its time, while no reply is sampled."""
        self._ended = False

    def call(self, request: ModelRequest, *, name: str | None = None, is_retry: bool = False) -> Call:
        """Return a new call, or the earlier call that this request repeats.

        A request repeats a call if it has the same idempotency key (`name`), comes from a client that says that it
        retries, or equals a request whose reply did not reach its client. Raises RequestError.
        """
        if self._ended:
            raise attempt_ended()
        known = self._by_name.get(name) if name else None
        if known is not None and known.request.fingerprint != request.fingerprint:
            raise RequestError(
                "this idempotency key was used for another request", status=422, code="idempotency_error"
            )
        known = known or self._repeated(request.fingerprint, is_retry=is_retry)
        if known is not None:
            known.left = False
            return known
        call = self._start(request)
        if name:
            self._by_name[name] = call
        return call

    def take_answer(self, answer: str) -> None:
        """Accept a posted answer; only the first one counts."""
        if self.posted is None:
            self.posted = answer
        self.answered.set()

    def conversation_until(self, reply_id: str, call_id: Callable[[str], str]) -> tuple[ChatMessage, ...] | None:
        """Return the messages up to and including a reply, without the instructions of its request.

        Returns None for a reply of another attempt. `call_id` turns call names into a protocol's ids.
        """
        for call in self._calls:
            reply = call.answered()
            if reply is not None and reply.id == reply_id:
                *before, message = call.conversation[call.request.num_instructions :]
                return (*before, replace(message, call_ids=tuple(map(call_id, reply.call_names))))
        return None

    async def end(self) -> list[Turn]:
        """Stop sampling, reject later calls, and return the turns in the order of their requests."""
        self._ended = True
        self._stop_idling()
        for call in self._calls:
            call.answering.cancel()
        await asyncio.gather(*(call.answering for call in self._calls), return_exceptions=True)
        self._writer.release()
        return [turn for call in self._calls if (turn := call.turn()) is not None]

    def _repeated(self, fingerprint: str, *, is_retry: bool) -> Call | None:
        alike = (call for call in self._calls if call.request.fingerprint == fingerprint)
        equal = [call for call in alike if call.answered() or not call.answering.done()]
        unread = [call for call in equal if not call.delivered]
        left = next((call for call in unread if call.left), None)
        # A retry may arrive before the server notices that its client has disconnected.
        return (unread or equal)[-1] if left is None and is_retry and equal else left

    def _start(self, request: ModelRequest) -> Call:
        try:
            prompt = self._prompt(request)
        except ChatTemplateError as error:
            raise RequestError(
                f"this model's chat template cannot render these messages: {error}", param="messages"
            ) from None
        room = self.rules.max_context_tokens - len(prompt.token_ids)
        if room < 1:
            self.out_of_context = (
                f"these messages have {len(prompt.token_ids)} tokens, and prompt and reply together may have "
                f"{self.rules.max_context_tokens} (rollout.engine.max_model_len)"
            )
            raise RequestError(self.out_of_context, code="context_length_exceeded", param="messages")
        # An agent that continues with a shorter prompt did not fail because of the context.
        self.out_of_context = None
        if parent := prompt.parent:
            # The agent has read the reply that it continues.
            parent.delivered = True
            results = [message.content for message in prompt.tail if message.role == "tool"]
            if results and parent.tool_result is None:
                parent.tool_result = ToolResult(text="\n".join(results))
        self._stop_idling()
        call = Call(request, prompt, number=len(self._calls))
        call.answering = asyncio.ensure_future(self._sample(call, min(room, request.max_tokens)))
        # Retrieve the error, which asyncio would otherwise log if no client waits for the reply any more.
        call.answering.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        self._calls.append(call)
        self._num_sampling += 1
        return call

    def _prompt(self, request: ModelRequest) -> Prompt:
        """Return the prompt's ids without tokenizing again what this attempt sampled.

        A request whose messages begin with an earlier conversation gets the ids of that prompt and of the sampled
        reply; only the messages since then are rendered. A request that changes the history begins a branch at the
        last reply that it leaves unchanged. Raises ChatTemplateError.
        """
        turns = turns_of(request.messages, request.tools)
        continued = (
            call
            for call in reversed(self._replied)
            if call.request.tools == request.tools and request.messages[: len(call.conversation)] == call.conversation
        )
        # Of equal conversations the latest one is continued.
        parent = max(continued, key=lambda call: len(call.conversation), default=None)
        reply = parent.answered() if parent else None
        if parent is None or reply is None:
            return Prompt(token_ids=self._chat.dialogue(turns), parent=None, tail=request.messages)
        sampled = reply.completion.token_ids
        later = self._chat.continuation(turns, len(turns_of(parent.conversation, request.tools)), sampled)
        return Prompt(
            token_ids=parent.prompt.token_ids + sampled + later,
            parent=parent,
            tail=request.messages[len(parent.conversation) :],
        )

    def _stop_idling(self) -> None:
        # Since the last reply the agent was busy with its tools.
        if self._idle_since is not None:
            call, since = self._idle_since
            call.tool_s, self._idle_since = time.perf_counter() - since, None

    async def _sample(self, call: Call, max_tokens: int) -> Reply:
        started, request, prompt = time.perf_counter(), call.request, call.prompt
        try:
            with self.limit.paused() if self._writer.by_engine else nullcontext():
                completion = await self._writer.write(request, prompt.token_ids, max_tokens)
        except WriterError as error:
            self.broken = str(error)
            raise RequestError(str(error), status=error.status, code=error.code) from error
        except ValueError as error:
            raise RequestError(str(error)) from error
        finally:
            self._num_sampling -= 1
            if not self._num_sampling:
                self._idle_since = call, time.perf_counter()
        if request.tools:
            message = read_reply(completion.text)
        else:
            message = ChatMessage(role="assistant", content=completion.text.strip())
        call.generate_s = time.perf_counter() - started
        call.conversation = (*request.messages, message)
        self._replied.append(call)
        return Reply(
            id=secrets.token_hex(12),
            number=call.number,
            created=int(time.time()),
            num_prompt_tokens=len(prompt.token_ids),
            completion=completion,
            # The agent gets the sampled text with its white space.
            message=message if message.calls else replace(message, content=completion.text),
            stopped_at=self._stopped_at(completion, request.stop),
        )

    def _stopped_at(self, completion: Completion, stop: tuple[str, ...]) -> str | None:
        if not stop or completion.finish_reason != "stop":
            return None
        rest = self._chat.text(completion.token_ids)[len(completion.text) :]
        return next((text for text in stop if rest.startswith(text)), None)
