"""What Python and pydantic say of an error, in words for a person."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from configs.base import Config, types_of
from configs.errors import did_you_mean

_SAID = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a type or a table",
    "missing": "is missing",
    "url_parsing": "must be an address such as http://127.0.0.1:8000/v1",
    "url_scheme": "must be an address that begins with http:// or https://",
}
FORMS = {
    r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$": "module:name, such as my_reward:score",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits, '.', '_' and '-', with a letter or a digit first",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "the name of an environment variable, such as OPENAI_API_KEY",
    r"^[A-Za-z0-9_-]{1,64}$": "at most 64 letters, digits, '_' and '-'",
    r"^https?://\S+$": "an address that begins with http:// or https://",
    r"^https?://[^\s@?#]+[^\s@?#/]$": "an address such as http://127.0.0.1:8000/v1, without user, query and last slash",
}
"""What the patterns of the settings mean."""

_NEVER_QUOTED = {"api_key_env", "base_url", "command", "source", "url", "wikipedia_url"}
"""Settings in which a key may stand by mistake."""


def describe(detail: Any, model: type[BaseModel]) -> str:
    """One of a ValidationError's details. A setting that does not exist is compared with those of `model`."""
    place, types = _placed(detail["loc"], model)
    key = ".".join(place) or "recipe"
    if detail["type"] == "extra_forbidden":
        known = list(setting_names(model))
        if said := _of_another_type(place[-1], types):
            whole = _first_setting(key, detail["input"])
            return f"unknown key '{key}': {said}{'' if whole in known else did_you_mean(whole, known)}"
        near = did_you_mean(key, known)
        if not near:
            near = "; `agentflow train --dry-run` prints every key that exists"
        return f"unknown key '{key}'{near}"
    if detail["type"] == "union_tag_invalid":
        given = str(detail["ctx"]["tag"])
        return f"{key}.type: must be {listed(types)} (got {json.dumps(given)}){did_you_mean(given, types)}"
    value = detail.get("input")
    if detail["loc"][-1:] and detail["loc"][-1] in _NEVER_QUOTED:
        return f"{key}: {_message(detail)}"
    shown = "a table" if isinstance(value, dict) else json.dumps(value, default=str)
    got = "" if detail["type"] in ("missing", "value_error") and isinstance(value, dict) else f" (got {shown})"
    return f"{key}: {_message(detail)}{got}"


def _first_setting(key: str, given: object) -> str:
    """The dotted name of the first setting that was given below `key`, or `key` where it is one itself."""
    for name, value in given.items() if isinstance(given, dict) else ():
        return _first_setting(f"{key}.{name}", value)
    return key


def reason(error: Exception) -> str:
    """Why a file or its content is of no use, for the middle of a sentence: without an error number, in one line."""
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"there is no {Path(error.filename).name}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror[0].lower()}{error.strerror[1:]}"
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))} {_message(first)}"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, KeyError):
        return f"{error} is missing in it"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON, {error}"
    return " ".join(str(error).split())


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings; NAME stands for the names that a table's user chooses."""
    for name, field in model.model_fields.items():
        inner = [one for one in (field.annotation, *get_args(field.annotation)) if _is_model(one)]
        below = f"{prefix}{name}.NAME." if get_origin(field.annotation) is dict else f"{prefix}{name}."
        yield from dict.fromkeys(setting for one in inner for setting in setting_names(one, below))
        if not inner:
            yield prefix + name


def unwritable(folder: Path) -> str | None:
    """Why a folder that may not be there yet cannot be made or written to, for a message; None where it can."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return None
    return f"'{nearest}' {'may not be written to' if nearest.is_dir() else 'is no folder'}"


def listed(names: Iterable[str], word: str = "or") -> str:
    """'a', 'b' or 'c'."""
    *most, last = (repr(name) for name in names)
    return f"{', '.join(most)} {word} {last}" if most else last


def _placed(location: tuple[str | int, ...], model: type[BaseModel]) -> tuple[list[str], dict[str, type[Config]]]:
    """The keys on the way to a setting, without the types that pydantic names between them; and the types of the
    innermost table that has some."""
    keys: list[str] = []
    at: type[BaseModel] | None = model
    types: dict[str, type[Config]] = {}
    chosen = ""
    for part in map(str, location):
        if keys and part in types and not chosen:
            chosen, at = part, types[part]
            continue
        keys.append(part)
        field = at.model_fields.get(part) if at else None
        if field is None:
            continue
        if found := types_of(field.annotation):
            types, chosen, at = found, "", None
        else:
            at = next((one for one in (field.annotation, *get_args(field.annotation)) if _is_model(one)), None)
            types = {} if at else types
    return keys, {name: types[name] for name in sorted(types, key=lambda name: name != chosen)}


def _of_another_type(key: str, types: Mapping[str, type[Config]]) -> str:
    """What to do with a key that the first of these types does not have; nothing where none has it."""
    has = [name for name, found in types.items() if key in found.model_fields]
    if not has:
        return ""
    chosen = next(iter(types))
    own = [name for name in types[chosen].model_fields if name != "type"]
    return f"type = '{chosen}' has {listed(own, 'and') if own else 'no settings'}, {listed(has)} has it"


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _message(detail: Any) -> str:
    """Our own validators speak in sentences already."""
    context = detail.get("ctx", {})
    if detail["type"] == "string_pattern_mismatch" and context["pattern"] in FORMS:
        return f"must be {FORMS[context['pattern']]}"
    if detail["type"] in _SAID:
        return _SAID[detail["type"]].format(**{name: _bound(value) for name, value in context.items()})
    return str(detail["msg"]).removeprefix("Value error, ")


def _bound(value: object) -> str:
    """0 and 1,000,000, not 0.0 and 1e+06."""
    if isinstance(value, int | float) and value == int(value):
        return f"{int(value):,}"
    return str(value)
