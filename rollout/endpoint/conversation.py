"""The conversations of one attempt: token ids in, the same token ids out.

An assistant's message that this attempt's engine sampled is never tokenised again. A request whose messages begin with
a recorded conversation goes on from the ids of its prompt and its sampled reply, and renders only what follows. One
that edits the history begins a branch at the last reply that it leaves as it was.
"""

from dataclasses import dataclass

from rollout.chat import ChatFormat
from rollout.endpoint.messages import Said, turns_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A request's messages and the reply to them; `token_ids` of all of it, as sampled. `call` numbers the attempt's
    calls from 0."""

    call: int
    messages: tuple[Said, ...]
    tools: tuple[str, ...]
    prompt_token_ids: tuple[int, ...]
    sampled: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`parent`: the recorded conversation that it goes on from; `tail`: the messages since."""

    token_ids: tuple[int, ...]
    parent: Recorded | None
    tail: tuple[Said, ...]


class Conversations:
    """Grows by one entry for every call of an attempt."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._recorded: list[Recorded] = []

    def prompt(self, messages: tuple[Said, ...], tools: tuple[str, ...]) -> Prompt:
        """Raises ChatTemplateError."""
        parent = self._longest(messages, tools)
        turns = turns_of(messages, tools)
        if parent is None:
            return Prompt(token_ids=self._chat.dialogue(turns), parent=None, tail=messages)
        since = len(turns_of(parent.messages, tools))
        later = self._chat.continuation(turns, since, parent.sampled)
        return Prompt(
            token_ids=parent.prompt_token_ids + parent.sampled + later,
            parent=parent,
            tail=messages[len(parent.messages) :],
        )

    def record(self, one: Recorded) -> None:
        self._recorded.append(one)

    def _longest(self, messages: tuple[Said, ...], tools: tuple[str, ...]) -> Recorded | None:
        """Of two that say the same, the later."""
        fits = (
            one
            for one in reversed(self._recorded)
            if one.tools == tools and messages[: len(one.messages)] == one.messages
        )
        return max(fits, key=lambda one: len(one.messages), default=None)
