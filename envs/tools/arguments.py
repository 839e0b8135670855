"""The planner's text as the arguments of a tool, by the JSON schema of the tool's parameters."""

import json
from collections.abc import Mapping

from configs.errors import MAX_JSON_DEPTH, check_depth, in_whole_letters

_TYPES = {"string", "integer", "number", "boolean", "object", "array", "null"}
Fields = Mapping[str, object]


def arguments_of(text: str, schema: Fields) -> dict[str, object]:
    """Return the arguments that a text represents; raises ValueError that names the fields.

    A tool with one parameter, a required string, gets the text as it is. Any other gets the fields of a JSON object; if
    its only parameter may be a string, a text that is no such object is that string.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    elif not properties:
        return {}
    kinds = {name: _types(one) for name, one in properties.items()}
    only = next(iter(kinds)) if len(kinds) == 1 else None
    may_be_text = only is not None and "string" in kinds[only]
    required = schema.get("required")
    if may_be_text and kinds[only] == {"string"} and isinstance(required, list) and only in required:
        return {str(only): text}
    try:
        value = in_whole_letters(json.loads(text))
        json.dumps(value, allow_nan=False)  # rejects infinite numbers, which are not JSON
        check_depth(value)
        if isinstance(value, dict) and not (may_be_text and value.keys() - kinds.keys()):
            return value
    except (ValueError, RecursionError):
        pass
    if may_be_text:
        return {str(only): text}
    if not properties:
        return {}
    shown = {name: "any" if one == _TYPES else " or ".join(sorted(one)) for name, one in list(kinds.items())[:20]}
    fields = ", ".join(f"{name} ({types})" for name, types in shown.items())
    raise ValueError(f"not a JSON object, nested at most {MAX_JSON_DEPTH} deep, with the fields {fields}")


def _types(schema: object) -> set[str]:
    """Return the types that a value of this schema may have, as far as its `type` and `anyOf` restrict them."""
    if not isinstance(schema, Mapping):
        return _TYPES
    parts = schema.get("anyOf")
    if isinstance(parts, list) and parts:
        return set[str]().union(*map(_types, parts))
    given = schema.get("type", [*_TYPES])
    return _TYPES & set(map(str, given if isinstance(given, list) else [given]))
