"""The arguments of a tool in the planner's grammar: from a JSON schema to EBNF without free white space."""

import json

from envs.types import Schema

RULES = (
    'integer ::= "-"? ("0" | [1-9] [0-9]{0,14})',
    'number ::= integer ("." [0-9]{1,14})?',
    'boolean ::= "true" | "false"',
    'null ::= "null"',
)
"""Beside `text`, what `argument_value` names. Numbers have an end, or a small model would never come to one."""


def argument_value(schema: Schema) -> str:
    """EBNF of a value: an object with all its fields in their order, a list, a choice, or one of the plain types."""
    match schema:
        case {"type": "object", "properties": fields}:
            values = [f"{_quoted(json.dumps(name) + ':')} {argument_value(value)}" for name, value in fields.items()]
            return " ".join(('"{"', ' "," '.join(values), '"}"'))
        case {"type": "array", "items": item}:
            value = argument_value(item)
            return f'"[" ({value} ("," {value})*)? "]"'
        case {"anyOf": choices}:
            return f"({' | '.join(map(argument_value, choices))})"
        case {"enum": values}:
            return f"({' | '.join(_quoted(json.dumps(value, ensure_ascii=False)) for value in values)})"
        case {"type": "string"}:
            return r'"\"" text "\""'
    return str(schema["type"])


def _quoted(text: str) -> str:
    """As a terminal, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)
