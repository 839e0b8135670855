"""One attempt of a custom agent, as the endpoint sees it: each model call becomes one turn of the record."""

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

from envs.types import ToolCall, ToolResult
from rollout.chat import ChatFormat, ChatTemplateError
from rollout.endpoint.messages import ChatMessage, RequestError, read_calls, turns_of
from rollout.endpoint.request import ModelRequest, Rules
from rollout.endpoint.writer import EngineWriter, Writer
from rollout.engines.engine import TimeLimit
from rollout.guide import Guide
from rollout.types import Completion, Turn

Bound = Literal["context", "calls"]
"""What an attempt may use up."""
CHARS_PER_TOKEN = 32
"""More than text has that a tokenizer was trained on, runs of blanks included."""
LARGE_CHARS = 50_000
REFUSAL_S = 1.0
"""Time between two refusals, so that an agent that never stops asking does not keep the event loop busy."""
_ASIDE = ThreadPoolExecutor(1, thread_name_prefix="model-endpoint")
Result = TypeVar("Result")


async def aside(work: Callable[[], Result], num_chars: int) -> Result:
    """Return the result of work on a text: for a large one, of one after the other in a thread."""
    if num_chars <= LARGE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_ASIDE, work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A sampled reply."""

    id: str
    request: ModelRequest
    number: int
    """Number of its call in the attempt, from 0."""
    created: int
    num_prompt_tokens: int
    completion: Completion
    message: ChatMessage
    """The completion's text as a message. Words come with their white space."""
    stopped_at: str | None
    """The request's stop text that ended it."""

    @property
    def num_tokens(self) -> int:
        return len(self.completion.token_ids)

    @property
    def call_names(self) -> tuple[str, ...]:
        """Names of its function calls: unique in an attempt, and the same in attempts that take the same course."""
        return tuple(f"{self.number}_{index}" for index in range(len(self.message.calls)))

    @property
    def conversation(self) -> tuple[ChatMessage, ...]:
        """The request's messages and the reply."""
        return (*self.request.messages, replace(self.message, content=self.message.content.strip()))


@dataclass(eq=False, slots=True, kw_only=True)
class Call:
    """One model call of an attempt."""

    request: ModelRequest
    number: int
    prompt_token_ids: tuple[int, ...]
    parent: "Call | None"
    """The call whose reply this prompt continues."""
    tail: tuple[ChatMessage, ...]
    """The messages since that reply."""
    answering: "asyncio.Task[Reply]" = field(init=False)
    reply: Reply | None = None
    """None until it is sampled."""
    score: float | None = None
    num_candidates: int = 1
    """As in `Turn`, where a guide chose the reply."""
    delivered: bool = False
    """The client received the complete reply."""
    left: bool = False
    """The client disconnected before that."""
    tool_result: ToolResult | None = None
    generate_s: float = 0.0
    finished: float = 0.0
    tool_s: float = 0.0

    async def answered(self) -> Reply:
        """Wait for the reply. Sampling continues if the caller is cancelled. Raises RequestError."""
        await asyncio.wait((self.answering,))
        if self.answering.cancelled():
            raise _ended()
        return self.answering.result()

    def turn(self, reply: Reply) -> Turn:
        """Return the turn. A reply that never reached the agent did not influence it, so it is not trained on."""
        calls, call = reply.message.calls, None
        if calls:
            arguments = "\n".join(one.arguments for one in calls)
            call = ToolCall(name=", ".join(one.name for one in calls), arguments=arguments)
        tools = self.request.tools if self.parent is None else ()
        return Turn.of(
            role="planner",
            prompt_token_ids=self.prompt_token_ids,
            completion=reply.completion,
            trainable=self.delivered,
            grammar=self.request.grammar,
            thought=reply.message.content if calls else "",
            tool_call=call,
            tool_result=self.tool_result,
            heard="\n".join(f"{one.role}: {one.content}" for one in turns_of(self.tail, tools)),
            score=self.score,
            num_candidates=self.num_candidates,
            generate_s=round(self.generate_s, 4),
            tool_s=round(self.tool_s, 4),
        )


def _ended() -> RequestError:
    return RequestError("this attempt has ended and is scored already", status=403, code="attempt_ended")


class Attempt:
    """The calls of one attempt, which carry its key."""

    def __init__(
        self,
        writer: Writer,
        chat: ChatFormat,
        rules: Rules,
        limit: TimeLimit | None = None,
        guide: Guide | None = None,
    ) -> None:
        """Open an attempt, in a running event loop. A guide chooses its replies from several samples."""
        self.rules = rules
        self.limit = limit or TimeLimit()
        self.key = f"attempt-{secrets.token_urlsafe(24)}"
        self.posted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The answer that was posted first."""
        self.out_of_calls: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done as soon as a call was refused because there were too many before it, or a reply could not be sampled."""
        self.used_up: Bound | None = None
        """The bound for which the last call was refused."""
        self.refusal: str | None = None
        """The message of that refusal."""
        self.broken: str | None = None
        """The reason if a reply could not be sampled."""
        self._lost: RequestError | None = None
        """The refusal of all later calls then."""
        self._writer = writer
        self._chat = chat
        self._guide = guide
        self._calls: list[Call] = []
        self._starting = asyncio.Lock()
        self._ended = False

    async def call(self, request: ModelRequest, *, is_retry: bool = False) -> Call:
        """Return a new call, or the earlier call that this request repeats. Raises RequestError.

        It repeats an equal request if its client says that it retries, or if the reply did not reach the client.
        """
        async with self._starting:
            if self._ended:
                raise _ended()
            if self._lost:
                await asyncio.sleep(REFUSAL_S)
                raise self._lost
            if known := self._repeated(request, is_retry=is_retry):
                known.left = False
                return known
            return await self._start(request)

    def reply(self, reply_id: str) -> Reply | None:
        """Return a reply of this attempt."""
        return next((call.reply for call in self._calls if call.reply and call.reply.id == reply_id), None)

    @property
    def is_sampling(self) -> bool:
        return any(not call.answering.done() for call in self._calls)

    def conversation_until(self, reply_id: str) -> tuple[ChatMessage, ...] | None:
        """Return the messages up to and including a reply of this attempt, without the instructions of its request."""
        if (reply := self.reply(reply_id)) is None:
            return None
        *before, message = reply.conversation[reply.request.num_instructions :]
        return (*before, replace(message, call_ids=tuple(f"call_{name}" for name in reply.call_names)))

    async def sampled(self) -> None:
        """Wait for the replies that are being sampled."""
        await asyncio.gather(*(call.answering for call in self._calls), return_exceptions=True)

    async def end(self) -> list[Turn]:
        """Stop sampling, reject later calls, and return the turns in the order of their requests."""
        self._ended = True
        self._stop_idling()
        for call in self._calls:
            call.answering.cancel()
        await self.sampled()
        if isinstance(self._writer, EngineWriter):
            self._writer.engine.release(self._writer.trajectory_id)
        return [call.turn(call.reply) for call in self._calls if call.reply is not None]

    def _repeated(self, request: ModelRequest, *, is_retry: bool) -> Call | None:
        alike = (call for call in self._calls if call.request.body == request.body)
        equal = [call for call in alike if call.reply or not call.answering.done()]
        unread = [call for call in equal if not call.delivered]
        left = next((call for call in unread if call.left), None)
        # A retry may arrive before the server notices that its client has disconnected.
        return (unread or equal)[-1] if left is None and is_retry and equal else left

    async def _start(self, request: ModelRequest) -> Call:
        if len(self._calls) >= self.rules.max_calls:
            await self._refuse_call()
        most, num_messages = self.rules.max_context_tokens, len(request.messages)
        num_chars = sum(len(one.text) for one in request.messages) + sum(map(len, request.tools))
        if num_messages > most or num_chars > CHARS_PER_TOKEN * most:
            raise self._full(f"{num_messages} messages with {num_chars} characters")
        try:
            call = await aside(lambda: self._begun(request), num_chars)
        except ChatTemplateError as error:
            raise RequestError(
                f"this model's chat template cannot render these messages: {error}", param="messages"
            ) from None
        if self._ended:
            raise _ended()
        room = most - len(call.prompt_token_ids)
        if room < 1:
            raise self._full(f"messages with {len(call.prompt_token_ids)} tokens")
        # An agent that continues with a shorter prompt did not fail because of the context.
        self.used_up = self.refusal = None
        if parent := call.parent:
            # The agent has read the reply that it continues.
            parent.delivered = True
            results = [message.content for message in call.tail if message.role == "tool"]
            if results and parent.tool_result is None:
                parent.tool_result = ToolResult(text="\n".join(results))
        self._stop_idling()
        call.answering = asyncio.ensure_future(self._sample(call, min(room, request.max_tokens)))
        # Retrieve the error, which asyncio would otherwise log if no client waits for the reply any more.
        call.answering.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        self._calls.append(call)
        return call

    async def _refuse_call(self) -> None:
        if self.out_of_calls.done():
            await asyncio.sleep(REFUSAL_S)
        else:
            self.out_of_calls.set_result(None)
        self.used_up = "calls"
        self.refusal = (
            f"this attempt made {len(self._calls)} model calls, as many as it may (rollout.max_calls); answer now"
        )
        raise RequestError(self.refusal, status=403, code="too_many_calls")

    def _full(self, given: str) -> RequestError:
        self.used_up = "context"
        self.refusal = (
            f"these are {given}, and prompt and reply together may have {self.rules.max_context_tokens} tokens "
            "(rollout.engine.max_model_len)"
        )
        return RequestError(self.refusal, code="context_length_exceeded", param="messages")

    def _begun(self, request: ModelRequest) -> Call:
        """Return the call with its prompt's ids. Raises ChatTemplateError.

        A request whose messages begin with an earlier conversation gets the ids of that prompt and of the sampled
        reply; only the messages since then are tokenized.
        """
        turns, number = turns_of(request.messages, request.tools), len(self._calls)
        continued = [
            (call, reply, len(reply.conversation))
            for call in reversed(self._calls)
            if (reply := call.reply)
            and reply.request.tools == request.tools
            and request.messages[: len(reply.conversation)] == reply.conversation
        ]
        if not continued:
            ids = self._chat.dialogue(turns)
            return Call(request=request, number=number, prompt_token_ids=ids, parent=None, tail=request.messages)
        # Of equal conversations the latest one is continued.
        parent, reply, since = max(continued, key=lambda one: one[2])
        sampled = reply.completion.token_ids
        num_turns = len(turns_of(request.messages[:since], request.tools))
        ids = parent.prompt_token_ids + sampled + self._chat.continuation(turns, num_turns, sampled)
        return Call(request=request, number=number, prompt_token_ids=ids, parent=parent, tail=request.messages[since:])

    def _stop_idling(self) -> None:
        # Since the last reply the agent was busy with its tools, unless another reply is being sampled.
        if self._calls and all(call.answering.done() for call in self._calls):
            last = max(self._calls, key=lambda call: call.finished)
            last.tool_s = time.perf_counter() - last.finished

    async def _sample(self, call: Call, max_tokens: int) -> Reply:
        started = time.perf_counter()
        try:
            # The time of an engine does not count as the agent's.
            with self.limit.paused() if isinstance(self._writer, EngineWriter) else nullcontext():
                if self._guide is None:
                    reply = await self._written(call, call.request, max_tokens)
                else:
                    turns = [one.turn(one.reply) for one in self._calls if one.reply]
                    turn, reply = await self._guide.choose(turns, partial(self._candidate, call, max_tokens))
                    call.score, call.num_candidates = turn.score, turn.num_candidates
        except RequestError as error:
            self.broken = str(error)
            # After a status of 500 and more clients would retry.
            self._lost = error if error.status < 500 else RequestError(str(error), status=403, code="attempt_lost")
            if not self.out_of_calls.done():
                self.out_of_calls.set_result(None)
            raise
        except ValueError as error:
            raise RequestError(str(error)) from error
        finally:
            call.finished = time.perf_counter()
            call.generate_s = call.finished - started
        call.reply = reply
        return reply

    async def _candidate(self, call: Call, max_tokens: int) -> tuple[Turn, Reply]:
        # With the seed of a request all candidates would be equal.
        reply = await self._written(call, replace(call.request, seed=None), max_tokens)
        return call.turn(reply), reply

    async def _written(self, call: Call, request: ModelRequest, max_tokens: int) -> Reply:
        completion = await self._writer.write(request, call.prompt_token_ids, max_tokens)
        # A grammar has no place for thoughts.
        thinking = self._chat.opens_thought and request.grammar is None
        message = read_calls(completion.text, thinking=thinking) if request.tools else None
        return Reply(
            id=secrets.token_hex(12),
            request=call.request,
            number=call.number,
            created=int(time.time()),
            num_prompt_tokens=len(call.prompt_token_ids),
            completion=completion,
            message=message or ChatMessage(role="assistant", content=completion.text),
            stopped_at=self._stopped_at(completion, request.stop),
        )

    def _stopped_at(self, completion: Completion, stop: tuple[str, ...]) -> str | None:
        if not stop or completion.finish_reason != "stop":
            return None
        rest = self._chat.text(completion.token_ids)[len(completion.text) :]
        return next((text for text in stop if rest.startswith(text)), None)
