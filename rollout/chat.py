"""The chat format as token pieces: one renderer for training and inference.

The model's template is rendered around placeholders and cut there. Fixed pieces keep their special tokens. What a task,
a tool or a model wrote is tokenized with special tokens and those that mark roles disabled, so a tool result that holds
`<|im_end|>` stays text and cannot forge a role. Roles that a template marks with plain text, such as Llama 2's
`[INST]`, can be forged. A later turn only appends (prompt, sampled ids, bridge): sampled ids are never tokenized again.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cached_property, lru_cache
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from configs.errors import UserError, whole_letters
from rollout.types import ChatRole, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SHAPES = 1000
"""Sequences of roles whose fixed pieces are cached."""
THOUGHTS: Mapping[str, str] = {"<think>": "</think>", "<thinking>": "</thinking>", "[THINK]": "[/THINK]"}
"""Where a model's thoughts begin and end."""

_TURNS: tuple[ChatRole, ...] = ("system", "user", "assistant", "user")
_BETWEEN = "\n\n"
"""Separates messages that share a turn, such as the system's text and the user's."""
_BEFORE = "\x01"
"""A text that shares no token with the text after it."""

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"


class ChatTemplateError(UserError):
    """A chat template that cannot render a growing dialogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPieces:
    """The fixed text of a chat template, in the order of a dialogue."""

    before_system: str
    before_lone_user: str
    """Start of a dialogue without a system message."""
    before_user: str
    before_assistant: str
    """Text before an earlier reply."""
    generation: str
    """Text before the next reply."""
    before_next: str


class Chat:
    """Turns a dialogue into token ids: into none for servers, which render and tokenize messages themselves."""

    def prompt(self, system: str, user: str) -> tuple[int, ...]:
        return ()

    def bridge(self, sampled: tuple[int, ...], user: str) -> tuple[int, ...]:
        return ()


class ChatFormat(Chat):
    """Token pieces of a Hugging Face tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Cut the tokenizer's chat template. Raises ChatTemplateError."""
        self._tokenizer = tokenizer
        self.pieces = chat_pieces(tokenizer)
        self.opens_thought = self.pieces.generation.rstrip().endswith(tuple(THOUGHTS))
        """The template begins a reply's thoughts."""
        self.turn_end = turn_end(tokenizer)
        """The token that ends a reply of the template."""
        self._marks = _marks(tokenizer)
        self._around = lru_cache(MAX_SHAPES)(self._pieces_around)
        # A tokenizer such as Llama 2's begins every text with a blank.
        before, letter, both = (self._ids(text) for text in (_BEFORE, "x", f"{_BEFORE}x"))
        self._before = () if both == before + letter else before

    def prompt(self, system: str, user: str) -> tuple[int, ...]:
        """Return the token ids up to the start of the assistant's reply."""
        return self.dialogue([Message(role="system", content=system), Message(role="user", content=user)])

    def bridge(self, sampled: tuple[int, ...], user: str) -> tuple[int, ...]:
        """Return the ids between a sampled reply and the next: its end, the user's text, the next start."""
        return self.continuation([Message(role=role, content=user) for role in _TURNS], len(_TURNS) - 1, sampled)

    def dialogue(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of any messages, up to the assistant's reply. Raises ChatTemplateError."""
        return self._joined(messages, self._around(tuple(one.role for one in messages)))

    def continuation(self, messages: Sequence[Message], since: int, sampled: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ids between a sampled reply and the next: its end, and the messages from index `since`.

        `sampled` are the ids of the assistant's message before `since`. Raises ChatTemplateError.
        """
        before, *pieces = self._around(tuple(one.role for one in messages))[since:]
        end = next((index for index, one in enumerate(before) if one in self._marks), len(before))
        if sampled and before[end : end + 1] == sampled[-1:]:
            # The end of the turn was sampled already, without the blank that some templates write before it.
            before = before[end + 1 :]
        return self._joined(messages[since:], (before, *pieces))

    def _joined(self, messages: Sequence[Message], pieces: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        later = (self._free(one.content) + piece for one, piece in zip(messages, pieces[1:], strict=True))
        return tuple(chain(pieces[0], *later))

    def _pieces_around(self, roles: tuple[ChatRole, ...]) -> tuple[tuple[int, ...], ...]:
        opening, *others = _pieces_of(self._tokenizer, roles)
        return (self._ids(opening), *map(self._inside, others))

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of these ids without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def rendered(self, token_ids: Sequence[int]) -> str:
        """Return the text of these ids, with the names of special tokens."""
        return str(self._tokenizer.decode(token_ids))

    def encode_completion(self, text: str) -> tuple[int, ...]:
        """Return the ids of a scripted completion, which end as the template's replies."""
        return (*self._free(text), self.turn_end)

    def _free(self, text: str) -> tuple[int, ...]:
        return self._inside(whole_letters(text), split_special_tokens=True)

    def _inside(self, text: str, *, split_special_tokens: bool = False) -> tuple[int, ...]:
        """Return the ids of a text that follows another one, without a blank that the tokenizer adds."""
        if self._before:
            ids = self._ids(f"{_BEFORE}{text}", split_special_tokens=split_special_tokens)
            if ids[: len(self._before)] == self._before:
                return ids[len(self._before) :]
        return self._ids(text, split_special_tokens=split_special_tokens)

    def _ids(self, text: str, *, split_special_tokens: bool = False) -> tuple[int, ...]:
        tokenizer = self._for_free if split_special_tokens else self._tokenizer
        encoding = tokenizer(text, add_special_tokens=False, split_special_tokens=split_special_tokens)
        return tuple(encoding.input_ids)

    @cached_property
    def _for_free(self) -> Tokenizer:
        """A copy of the tokenizer in which the added tokens that mark roles are special.

        Other added tokens, such as `<tool_call>` and `<think>`, stay tokens in every text.
        """
        used = {one for text in asdict(replace(self.pieces, generation="")).values() for one in self._ids(text)}
        added = [one for index, one in self._tokenizer.added_tokens_decoder.items() if index in used]
        free = copy.deepcopy(self._tokenizer)
        if marks := [token.content for token in added if token.content.strip() and not token.special]:
            free.add_tokens(marks, special_tokens=True)
        # Switched once, because switching a tokenizer that other threads use is not safe.
        free("", add_special_tokens=False, split_special_tokens=True)
        return free


def chat_pieces(tokenizer: Tokenizer) -> ChatPieces:
    """Return the fixed text of a tokenizer's chat template, with thinking disabled. Raises ChatTemplateError."""
    if tokenizer.chat_template is None:
        raise ChatTemplateError("it has no chat template")
    if tokenizer.eos_token_id is None:
        raise ChatTemplateError("its tokenizer names no token that ends a reply (eos_token)")

    before_system, before_user, generation = _pieces_of(tokenizer, _TURNS[:2])
    *earlier, before_assistant, before_next, _ = _pieces_of(tokenizer, _TURNS)
    if earlier != [before_system, before_user]:
        raise ChatTemplateError("its template renders the first turn differently if a second one follows")
    return ChatPieces(
        before_system=before_system,
        before_lone_user=_pieces_of(tokenizer, ("user",))[0],
        before_user=before_user,
        before_assistant=before_assistant,
        generation=generation,
        before_next=before_next,
    )


def _marks(tokenizer: Tokenizer) -> set[int]:
    """Return the added tokens, of which one ends a turn. Some tokenizers also add blanks."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    return {int(tokenizer.eos_token_id), *added}


def turn_end(tokenizer: Tokenizer) -> int:
    """Return the token that ends a reply of the chat template, or else the tokenizer's own end."""
    marks = _marks(tokenizer)
    with suppress(ChatTemplateError):
        # It stands after a reply both at the end of the dialogue and before a next turn.
        after = _pieces_of(tokenizer, _TURNS[:3], begins_reply=False)[3], _pieces_of(tokenizer, _TURNS)[3]
        for last, inner in zip(*(tokenizer(one, add_special_tokens=False).input_ids for one in after), strict=False):
            if last != inner:
                break
            if last in marks:
                return int(last)
    return int(tokenizer.eos_token_id)


def reply_ends(model_path: Path, tokenizer: Tokenizer) -> list[int]:
    """Return all tokens that end a reply, or a grammar: of the chat template, the tokenizer and the model's files."""
    from transformers import AutoConfig, GenerationConfig

    try:
        named = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        named = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model_path)).eos_token_id
    ends = {int(tokenizer.eos_token_id), *([named] if isinstance(named, int) else named or [])}
    return sorted({*ends, turn_end(tokenizer)})


def _pieces_of(tokenizer: Tokenizer, roles: Sequence[ChatRole], *, begins_reply: bool = True) -> list[str]:
    """Render a placeholder for each role, and return the text around them. Raises ChatTemplateError.

    If the template refuses these roles, the system's texts become the user's, and consecutive messages of one role
    share a turn.
    """
    marked = [(role, f"\x01{index}\x01") for index, role in enumerate(roles)]
    messages = [{"role": role, "content": mark} for role, mark in marked]
    try:
        return _cut(_render(tokenizer, messages, begins_reply), marked)
    except ChatTemplateError:
        turns = groupby(marked, lambda one: "user" if one[0] == "system" else one[0])
        shared = [{"role": role, "content": _BETWEEN.join(mark for _, mark in group)} for role, group in turns]
        if shared == messages:
            raise
        return _cut(_render(tokenizer, shared, begins_reply), marked)


def _render(tokenizer: Tokenizer, messages: list[dict[str, str]], begins_reply: bool) -> str:
    # The date is fixed for templates that write one, such as Llama 3.2's, so that all prompts of a run are the same.
    settings = {"tokenize": False, "enable_thinking": False, "strftime_now": date(2024, 7, 26).strftime}
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=begins_reply, **settings))
    except Exception as error:
        # A template is a program of the model's author, and may raise any error.
        raise ChatTemplateError(f"its template fails with: {' '.join(str(error).split())}") from error


def _cut(text: str, marked: Sequence[tuple[ChatRole, str]]) -> list[str]:
    pieces = []
    for role, mark in marked:
        before, found, text = text.partition(mark)
        if not found:
            raise ChatTemplateError(f"its template leaves out a message of role {role} or changes the order")
        pieces.append(before)
    pieces.append(text)
    if any("\x01" in piece for piece in pieces):
        raise ChatTemplateError("its template repeats a message")
    return pieces
