"""One attempt as its endpoint sees it: calls come in, completions go out, and each becomes one turn of the record."""

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from envs.types import ToolCall, ToolResult
from rollout.chat import ChatFormat, ChatTemplateError
from rollout.endpoint.messages import Refused, Said, read_reply, turns_of
from rollout.endpoint.request import Asked, Rules
from rollout.endpoint.writer import Writer, WriterError
from rollout.time_limit import TimeLimit
from rollout.types import Completion, Turn


def ended() -> Refused:
    return Refused(
        "this attempt has ended and was judged; a call after that cannot count", status=403, code="attempt_ended"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`parent`: the call whose reply it goes on from; `tail`: the messages since."""

    token_ids: tuple[int, ...]
    parent: "Call | None"
    tail: tuple[Said, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """`said` is the completion's text as a message; `stopped_at` the text of the request's own that ended it; `number`
    counts the attempt's replies from 0 in the order in which they were asked for."""

    id: str
    number: int
    created: int
    num_prompt_tokens: int
    completion: Completion
    said: Said
    stopped_at: str | None

    @property
    def call_names(self) -> tuple[str, ...]:
        """Of its calls, each once in an attempt and the same in every attempt that goes the same way: there are agents
        that write them into their prompts."""
        return tuple(f"{self.number}_{index}" for index in range(len(self.said.calls)))


class Call:
    """A request that is sampled, or was. `conversation`: its messages and the reply, once that is there. `delivered`:
    its client has all of the answer. `left`: its client went away before."""

    answering: "asyncio.Task[Reply]"

    def __init__(self, asked: Asked, prompt: Prompt, *, number: int) -> None:
        self.asked = asked
        self.prompt = prompt
        self.number = number
        self.conversation: tuple[Said, ...] = ()
        self.delivered = False
        self.left = False
        self.tool_result: ToolResult | None = None
        self.generate_s = 0.0
        self.tool_s = 0.0

    async def reply(self) -> Reply:
        """Whoever waits may go away; the sampling goes on. Raises Refused."""
        try:
            return await asyncio.shield(self.answering)
        except asyncio.CancelledError:
            if self.answering.cancelled():
                raise ended() from None
            raise

    def answered(self) -> Reply | None:
        """None where nothing was sampled, or not yet."""
        if not self.answering.done() or self.answering.cancelled() or self.answering.exception():
            return None
        return self.answering.result()

    def turn(self) -> Turn | None:
        """None where nothing was sampled. What never reached the agent is no act of the policy, and is not trained."""
        reply = self.answered()
        if reply is None:
            return None
        calls = reply.said.calls
        call = None
        if calls:
            arguments = [one.arguments for one in calls]
            call = ToolCall(name=", ".join(one.name for one in calls), arguments="\n".join(arguments))
        return Turn.of(
            role="planner",
            prompt_token_ids=self.prompt.token_ids,
            completion=reply.completion,
            trainable=self.delivered,
            grammar=self.asked.grammar,
            thought=reply.said.content if calls else "",
            tool_call=call,
            tool_result=self.tool_result,
            heard=self._heard,
            generate_s=round(self.generate_s, 4),
            tool_s=round(self.tool_s, 4),
        )

    @property
    def _heard(self) -> str:
        """What the agent said since the reply that it goes on from; where it begins, with the functions it names."""
        tools = self.asked.tools if self.prompt.parent is None else ()
        return "\n".join(f"{one.role}: {one.content}" for one in turns_of(self.prompt.tail, tools))


class Attempt:
    """Has a key of its own, by which its calls are known."""

    def __init__(self, writer: Writer, chat: ChatFormat, rules: Rules, *, timeout_s: float | None = None) -> None:
        self.rules = rules
        self.limit = TimeLimit(timeout_s)
        self.key = f"attempt-{secrets.token_urlsafe(24)}"
        self.posted: str | None = None
        self.answered = asyncio.Event()
        self.out_of_context: str | None = None
        self.broken: str | None = None
        self._writer = writer
        self._chat = chat
        self._calls: list[Call] = []
        self._replied: list[Call] = []
        """In the order in which the replies came."""
        self._by_name: dict[str, Call] = {}
        self._num_written = 0
        self._rests: tuple[Call, float] | None = None
        """The reply that was written last, and when, where none is being written."""
        self._ended = False

    def call(self, asked: Asked, *, name: str | None = None, is_retry: bool = False) -> Call:
        """A new call, or the one that this request asks for again: the same idempotency key, a client that says that it
        retries, or an equal request whose answer did not reach its client. Raises Refused."""
        if self._ended:
            raise ended()
        known = self._by_name.get(name) if name else None
        if known is not None and known.asked.fingerprint != asked.fingerprint:
            raise Refused("this idempotency key was used for another request", status=422, code="idempotency_error")
        known = known or self._asked_before(asked.fingerprint, is_retry=is_retry)
        if known is not None:
            known.left = False
            return known
        call = self._begin(asked)
        if name:
            self._by_name[name] = call
        return call

    def take_answer(self, answer: str) -> None:
        """It was posted. The first one is the attempt's answer."""
        if self.posted is None:
            self.posted = answer
        self.answered.set()

    def said_until(self, reply_id: str, call_id: Callable[[str], str]) -> tuple[Said, ...] | None:
        """All that was said up to a reply and with it, but for its request's instructions. None for a reply that is not
        this attempt's. `call_id`: how a dialect calls a call of this name."""
        for call in self._calls:
            reply = call.answered()
            if reply is not None and reply.id == reply_id:
                *before, said = call.conversation[call.asked.num_instructions :]
                return (*before, replace(said, call_ids=tuple(map(call_id, reply.call_names))))
        return None

    async def end(self) -> list[Turn]:
        """No call counts from now on; what is still written is dropped. The turns, in the order in which they were
        asked for."""
        self._ended = True
        self._goes_on()
        for call in self._calls:
            call.answering.cancel()
        await asyncio.gather(*(call.answering for call in self._calls), return_exceptions=True)
        self._writer.release()
        return [turn for call in self._calls if (turn := call.turn()) is not None]

    def _asked_before(self, fingerprint: str, *, is_retry: bool) -> Call | None:
        alike = (call for call in self._calls if call.asked.fingerprint == fingerprint)
        equal = [call for call in alike if call.answered() or not call.answering.done()]
        unread = [call for call in equal if not call.delivered]
        left = next((call for call in unread if call.left), None)
        # A retry may be here before the news that its client had left.
        return (unread or equal)[-1] if left is None and is_retry and equal else left

    def _begin(self, asked: Asked) -> Call:
        try:
            prompt = self._prompt(asked)
        except ChatTemplateError as error:
            raise Refused(f"this model's chat template cannot hold these messages: {error}", param="messages") from None
        room = self.rules.max_context_tokens - len(prompt.token_ids)
        if room < 1:
            self.out_of_context = (
                f"these messages have {len(prompt.token_ids)} tokens, and prompt and reply together may have "
                f"{self.rules.max_context_tokens} (rollout.engine.max_model_len)"
            )
            raise Refused(self.out_of_context, code="context_length_exceeded", param="messages")
        # Whoever goes on with fewer words has not ended over them.
        self.out_of_context = None
        if prompt.parent is not None:
            self._continued(prompt.parent, prompt)
        self._goes_on()
        call = Call(asked, prompt, number=len(self._calls))
        call.answering = asyncio.ensure_future(self._sample(call, min(room, asked.max_tokens)))
        call.answering.add_done_callback(_seen)
        self._calls.append(call)
        self._num_written += 1
        return call

    def _prompt(self, asked: Asked) -> Prompt:
        """An assistant's message that was sampled in this attempt is never tokenised again. A request whose messages
        begin with a conversation goes on from the ids of its prompt and its sampled reply, and renders only what
        follows. One that edits the history begins a branch at the last reply that it leaves as it was. Raises
        ChatTemplateError."""
        turns = turns_of(asked.messages, asked.tools)
        repeated = (
            call
            for call in reversed(self._replied)
            if call.asked.tools == asked.tools and asked.messages[: len(call.conversation)] == call.conversation
        )
        # Of two that say the same, the later.
        parent = max(repeated, key=lambda call: len(call.conversation), default=None)
        reply = parent.answered() if parent else None
        if parent is None or reply is None:
            return Prompt(token_ids=self._chat.dialogue(turns), parent=None, tail=asked.messages)
        sampled = reply.completion.token_ids
        later = self._chat.continuation(turns, len(turns_of(parent.conversation, asked.tools)), sampled)
        return Prompt(
            token_ids=parent.prompt.token_ids + sampled + later,
            parent=parent,
            tail=asked.messages[len(parent.conversation) :],
        )

    def _goes_on(self) -> None:
        """The agent asks again, or ends: until now it was busy with its tools."""
        if self._rests is not None:
            call, since = self._rests
            call.tool_s, self._rests = time.perf_counter() - since, None

    def _continued(self, parent: Call, prompt: Prompt) -> None:
        """Whoever goes on from a reply has read it, and says what its calls brought."""
        parent.delivered = True
        results = [one.content for one in prompt.tail if one.role == "tool"]
        if results and parent.tool_result is None:
            parent.tool_result = ToolResult(text="\n".join(results))

    async def _sample(self, call: Call, max_tokens: int) -> Reply:
        started, asked, prompt = time.perf_counter(), call.asked, call.prompt
        try:
            with self.limit.paused() if self._writer.by_engine else nullcontext():
                completion = await self._writer.write(asked, prompt.token_ids, max_tokens)
        except WriterError as error:
            self.broken = str(error)
            raise Refused(str(error), status=error.status, code=error.code) from error
        except ValueError as error:
            raise Refused(str(error)) from error
        finally:
            self._num_written -= 1
            if not self._num_written:
                self._rests = call, time.perf_counter()
        said = read_reply(completion.text) if asked.tools else Said(role="assistant", content=completion.text.strip())
        call.generate_s = time.perf_counter() - started
        call.conversation = (*asked.messages, said)
        self._replied.append(call)
        return Reply(
            id=secrets.token_hex(12),
            number=call.number,
            created=int(time.time()),
            num_prompt_tokens=len(prompt.token_ids),
            completion=completion,
            # What the agent reads is what was sampled, white space and all.
            said=said if said.calls else replace(said, content=completion.text),
            stopped_at=self._stopped_at(completion, asked.stop),
        )

    def _stopped_at(self, completion: Completion, stop: tuple[str, ...]) -> str | None:
        if not stop or completion.finish_reason != "stop":
            return None
        rest = self._chat.text(completion.token_ids)[len(completion.text) :]
        return next((text for text in stop if rest.startswith(text)), None)


def _seen(answering: "asyncio.Task[Reply]") -> None:
    """An error that nobody waits for any more is no news."""
    if not answering.cancelled():
        answering.exception()
