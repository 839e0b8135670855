"""What Python and pydantic say of an error, in words for a person."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

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
    "missing": "is missing",
    "url_parsing": "must be an address such as http://127.0.0.1:8000/v1",
    "url_scheme": "must be an address that begins with http:// or https://",
}
FORMS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits, '.', '_' and '-', with a letter or a digit first",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "the name of an environment variable, such as OPENAI_API_KEY",
    r"^[A-Za-z0-9_-]{1,64}$": "at most 64 letters, digits, '_' and '-'",
    r"^-?\d+(ms|s|m|h)?$": "a time such as 30s, 5m or 1h",
    r"^https?://\S+$": "an address that begins with http:// or https://",
    r"^https?://[^\s@?#]+[^\s@?#/]$": "an address such as http://127.0.0.1:8000/v1, without user, query and last slash",
}
"""What the patterns of the settings mean."""

_NEVER_QUOTED = {"api_key_env", "base_url", "location", "source", "wikipedia_url"}
"""Settings in which a key may stand by mistake."""


def describe(detail: Any, model: type[BaseModel]) -> str:
    """One of a ValidationError's details. A setting that does not exist is compared with those of `model`."""
    key = ".".join(str(part) for part in detail["loc"]) or "recipe"
    if detail["type"] == "extra_forbidden":
        near = did_you_mean(key, setting_names(model))
        if not near:
            near = "; `agentflow train --dry-run` prints every key that exists"
        return f"unknown key '{key}'{near}"
    value = detail.get("input")
    if detail["loc"][-1:] and detail["loc"][-1] in _NEVER_QUOTED:
        return f"{key}: {_message(detail)}"
    shown = "a table" if isinstance(value, dict) else json.dumps(value, default=str)
    got = "" if detail["type"] in ("missing", "value_error") and isinstance(value, dict) else f" (got {shown})"
    return f"{key}: {_message(detail)}{got}"


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
        yield from (setting for one in inner for setting in setting_names(one, below))
        if not inner:
            yield prefix + name


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _message(detail: Any) -> str:
    """Our own validators speak in sentences already."""
    context = detail.get("ctx", {})
    if detail["type"] == "string_pattern_mismatch" and context["pattern"] in FORMS:
        return f"must be {FORMS[context['pattern']]}"
    if detail["type"] in _SAID:
        return _SAID[detail["type"]].format(**{name: _bound(value) for name, value in context.items()})
    return str(detail["msg"]).removeprefix("Value error, ")


def _bound(value: Any) -> str:
    """0 and 1,000,000, not 0.0 and 1e+06."""
    whole = isinstance(value, int | float) and value == int(value)
    return f"{int(value):,}" if whole else str(value)
