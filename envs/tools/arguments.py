"""The planner's text as the arguments of a tool, by the JSON schema of the tool's parameters."""

import json
from collections.abc import Mapping
from urllib.parse import unquote

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
    try:
        known: dict[str, set[str]] = {}
        kinds = {name: _types(one, schema, known) for name, one in properties.items()}
    except (ValueError, RecursionError):
        kinds = dict.fromkeys(properties, _TYPES)
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


def _types(schema: object, root: Fields, known: dict[str, set[str]]) -> set[str]:
    """Return the types that a value of this schema may have; `known` holds those of the references."""
    if not isinstance(schema, Mapping):
        return _TYPES
    given = schema.get("type", [*_TYPES])
    found = _TYPES & set(map(str, given if isinstance(given, list) else [given]))
    if "$ref" in schema:
        pointer = str(schema["$ref"])
        if pointer not in known:
            # What refers to itself is restricted by its other parts.
            known[pointer] = _TYPES
            known[pointer] = _types(target(pointer, root), root, known)
        found &= known[pointer]
    for name in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(name)
        if isinstance(parts, list) and parts:
            kinds = [_types(part, root, known) for part in parts]
            joined: set[str] = set.intersection(*kinds) if name == "allOf" else set.union(*kinds)
            found &= joined
    return found


def target(pointer: str, root: object) -> object:
    """Return the part of a schema that a local `$ref` names; raises ValueError. Nothing is fetched."""
    path, found = pointer.removeprefix("#"), root
    try:
        if not pointer.startswith("#") or path[:1] not in ("", "/"):
            raise LookupError
        for part in unquote(path).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found[int(name)] if isinstance(found, list) else found[name]  # type: ignore[index]
    except (LookupError, TypeError, ValueError):
        raise ValueError(f"'$ref' {pointer[:80]!r} is no part of this schema; only '#/...' is supported") from None
    return found
