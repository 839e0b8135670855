"""The planner's text as the arguments of a tool, by the JSON schema of the tool's parameters."""

import json
from collections.abc import Mapping

from configs.errors import MAX_JSON_DEPTH, check_depth, in_whole_letters

_TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
Fields = Mapping[str, object]


def arguments_of(text: str, schema: Fields) -> dict[str, object]:
    """Return the arguments that a text stands for.

    A tool with one parameter, a required string, gets the text as it is. Any other gets the fields of a JSON object; if
    its only parameter may be a string, a text that is no such object is that string. Raises ValueError whose message
    names the fields.
    """
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    if "properties" in schema and not properties:
        return {}
    known: dict[str, set[str]] = {}
    try:
        kinds = {name: _types(one, schema, known) for name, one in properties.items()}
    except RecursionError:
        kinds = {name: set(_TYPES) for name in properties}
    required = schema.get("required")
    only = next(iter(kinds)) if len(kinds) == 1 else None
    is_text = only is not None and "string" in kinds[only]
    if is_text and kinds[only] == {"string"} and isinstance(required, list) and only in required:
        return {str(only): text}
    try:
        value = in_whole_letters(json.loads(text))
        # Rejects infinite numbers, which are not JSON.
        json.dumps(value, allow_nan=False)
        check_depth(value)
        if isinstance(value, dict) and not (is_text and value.keys() - kinds.keys()):
            return value
    except (ValueError, RecursionError):
        pass
    if is_text:
        return {str(only): text}
    if not properties:
        return {}
    fields = ", ".join(f"{name} ({_shown(one)})" for name, one in list(kinds.items())[:20])
    raise ValueError(f"not a JSON object, nested at most {MAX_JSON_DEPTH} deep, with the fields {fields}")


def _types(schema: object, root: Fields, known: dict[str, set[str]]) -> set[str]:
    """Return the types that a value of this schema may have; `known` holds those of the references."""
    found = set(_TYPES)
    if not isinstance(schema, Mapping):
        return found
    if "type" in schema:
        given = schema["type"]
        found &= set(map(str, given if isinstance(given, list) else [given]))
    for name, values in (("const", [schema.get("const")]), ("enum", schema.get("enum"))):
        if name in schema and isinstance(values, list):
            found &= {_type_of(value) for value in values}
    if "$ref" in schema:
        pointer = str(schema["$ref"])
        if pointer not in known:
            # What refers to itself is restricted by its other parts.
            known[pointer] = set(_TYPES)
            known[pointer] = _types(_target(pointer, root), root, known)
        found &= known[pointer]
    for name in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(name)
        if isinstance(parts, list) and parts:
            kinds = [_types(part, root, known) for part in parts]
            found &= set.intersection(*kinds) if name == "allOf" else set.union(*kinds)
    return found


def _target(pointer: str, root: object) -> object:
    """Return the part of the schema that a local reference names, or None. Nothing is fetched."""
    for part in pointer.removeprefix("#").split("/")[1:] if pointer.startswith("#") else [""]:
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def _type_of(value: object) -> str:
    names = {bool: "boolean", str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null")


def _shown(kinds: set[str]) -> str:
    return "any" if len(kinds) == len(_TYPES) else " or ".join(kind for kind in _TYPES if kind in kinds)
