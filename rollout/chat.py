"""The chat format as token pieces: one renderer for training and inference, and no way to forge a role.

The model's template is rendered once around placeholders and cut there. Fixed pieces keep their special
tokens; everything that a task, a tool or a model wrote is tokenised with special tokens switched off, so
a tool result that contains `<|im_end|>` stays text. A later turn only appends: prompt, sampled ids,
bridge. Nothing that was sampled is ever tokenised again.
"""

from dataclasses import dataclass
from typing import Any, Protocol

_SYSTEM, _USER, _ASSISTANT, _NEXT = "\x01system\x01", "\x01user\x01", "\x01assistant\x01", "\x01next\x01"


class Chat(Protocol):
    """How a dialogue becomes what an engine samples from."""

    def prompt(self, system: str, user: str) -> tuple[int, ...]: ...

    def bridge(self, sampled: tuple[int, ...], user: str) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPieces:
    """The fixed text of a chat template, in the order of a dialogue. A dialogue without a system message begins with
    `before_lone_user`."""

    before_system: str
    before_lone_user: str
    before_user: str
    generation: str
    before_next: str
    next_generation: str


class ServedChat:
    """For servers that render and tokenise messages themselves: there are no token ids to append."""

    def prompt(self, system: str, user: str) -> tuple[int, ...]:
        return ()

    def bridge(self, sampled: tuple[int, ...], user: str) -> tuple[int, ...]:
        return ()


class ChatFormat:
    """Token pieces of a Hugging Face tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        lone_user = {"role": "user", "content": _USER}
        opening = [{"role": "system", "content": _SYSTEM}, lone_user]
        dialogue = [
            *opening,
            {"role": "assistant", "content": _ASSISTANT},
            {"role": "user", "content": _NEXT},
        ]
        first = self._render(opening)
        before_system, rest = first.split(_SYSTEM)
        before_user, generation = rest.split(_USER)
        after_assistant = self._render(dialogue).split(_ASSISTANT)[1]
        before_next, next_generation = after_assistant.split(_NEXT)
        self.pieces = ChatPieces(
            before_system=before_system,
            before_lone_user=self._render([lone_user]).split(_USER)[0],
            before_user=before_user,
            generation=generation,
            before_next=before_next,
            next_generation=next_generation,
        )
        self._pieces = [self._fixed(piece) for piece in (before_system, before_user, generation)]
        self._bridge = [self._fixed(piece) for piece in (before_next, next_generation)]
        self.eos_token_id = int(tokenizer.eos_token_id)

    def prompt(self, system: str, user: str) -> tuple[int, ...]:
        """Token ids up to where the assistant starts to write."""
        before_system, before_user, generation = self._pieces
        return (*before_system, *self._free(system), *before_user, *self._free(user), *generation)

    def bridge(self, sampled: tuple[int, ...], user: str) -> tuple[int, ...]:
        """What stands between a sampled turn and the next one: its end, the user's text, the next start."""
        before_next, generation = self._bridge
        ended = bool(sampled) and sampled[-1] == self.eos_token_id and before_next[0] == self.eos_token_id
        return (*before_next[1 if ended else 0 :], *self._free(user), *generation)

    def encode_completion(self, text: str) -> tuple[int, ...]:
        """A scripted completion as the ids a sampler would have ended with EOS."""
        return (*self._free(text), self.eos_token_id)

    def _render(self, messages: list[dict[str, str]]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        )

    def _fixed(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _free(self, text: str) -> tuple[int, ...]:
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        return tuple(ids)
