"""Qwen3's thinking blocks: a reply is what stands after them."""

import re
from dataclasses import dataclass

_OPENING = re.compile(r"\s*<think>")
_CLOSING = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """`thinking` is None where there was no thinking, and the empty string for the empty block that Qwen3's template
    writes when thinking is off. `answer` is empty where the thinking never ended."""

    thinking: str | None
    answer: str


def parse_reply(text: str) -> ParsedReply:
    """Takes a reply apart. Only a block that opens the reply is thinking: a tag that a later JSON string quotes is
    text. The opening tag may be missing (the template wrote it into the prompt), the closing one too (the reply was
    cut)."""
    opening = _OPENING.match(text)
    body = text[opening.end() :] if opening else text
    inside, closing, answer = body.partition(_CLOSING)
    if closing and (opening or not inside.lstrip().startswith("{")):
        return ParsedReply(thinking=inside.strip(), answer=answer.lstrip())
    if opening:
        return ParsedReply(thinking=body.strip(), answer="")
    return ParsedReply(thinking=None, answer=text)
