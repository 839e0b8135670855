"""The planner's decision: its JSON form, the grammar that enforces it, and a strict parser."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FIELDS = ("thought", "action", "action_input")
ACTIONS = ("think", "search", "code", "answer")


class FormatError(ValueError):
    """A completion that is not one planner decision; the message says why, for the planner to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    thought: str
    action: str
    action_input: str

    def to_json(self) -> str:
        values = {"thought": self.thought, "action": self.action, "action_input": self.action_input}
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"))


def planner_grammar(actions: Sequence[str]) -> str:
    r"""EBNF of a decision whose action is one of `actions`, without free white space.

    Escapes are limited to \" \\ \/ \n \t. The others would let `\boxed` or `\frac` become a backspace
    or a form feed, and `\u` could write half a surrogate pair.
    """
    choice = " | ".join(f'"{action}"' for action in actions)
    return "\n".join(
        (
            r'root ::= "{\"thought\":\"" text "\",\"action\":\"" action "\",\"action_input\":\"" text "\"}"',
            f"action ::= {choice}",
            r'text ::= ([^"\\\x00-\x1f] | "\\" ["\\/nt])*',
        )
    )


def planner_schema(actions: Sequence[str]) -> dict[str, Any]:
    """The same decision as a JSON schema, for servers that constrain by one."""
    text = {"type": "string"}
    return {
        "type": "object",
        "properties": {"thought": text, "action": {"type": "string", "enum": list(actions)}, "action_input": text},
        "required": list(FIELDS),
        "additionalProperties": False,
    }


def parse_decision(text: str, actions: Sequence[str] = ACTIONS) -> Decision:
    """Read one decision; anything else is a FormatError.

    Strict on purpose: exactly the three fields, each once and a string, a known action in lower case,
    nothing around the object but white space. `action_input` may be empty only for `think`.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (json.JSONDecodeError, RecursionError):
        raise FormatError("not one complete JSON object") from None
    if not isinstance(value, dict) or set(value) != set(FIELDS):
        raise FormatError(f"not a JSON object with exactly the fields {', '.join(FIELDS)}")
    if not all(isinstance(value[field], str) for field in FIELDS):
        raise FormatError("every field must be a string")
    if value["action"] not in actions:
        raise FormatError(f"action must be one of {', '.join(actions)}")
    if value["action"] != "think" and not value["action_input"].strip():
        raise FormatError("action_input is empty")
    return Decision(**value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise FormatError("a field stands twice")
    return dict(pairs)


def _no_constant(name: str) -> None:
    raise FormatError(f"{name} is not JSON")
