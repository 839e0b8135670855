"""From a TOML recipe and dotted overrides to a checked RunConfig, with one-line errors."""

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.errors import UserError, did_you_mean
from configs.own import search_in
from configs.run import RunConfig
from configs.wording import describe, reason

RECIPES = Path(__file__).with_name("recipes")


class ConfigError(UserError):
    """A recipe or an override that cannot be used; the message is one line for a person."""


def load_run_config(recipe: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `recipe` (a file, a run's config.json, or the name of a built-in one), apply `a.b=value` overrides in order,
    validate. Raises ConfigError."""
    found = find_recipe(recipe) if recipe else None
    values = _read(found) if found else {}
    for override in overrides:
        _apply(values, override)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(describe(detail, RunConfig) for detail in error.errors())) from None
    if found and found.suffix != ".json" and config.names_code and config.code_path is None:
        config = config.model_copy(update={"code_path": str(found.parent)})
    search_in(config.code_path)
    return config


def find_recipe(recipe: Path) -> Path:
    """A built-in recipe where no file but one of them has this name, with or without its ending; else `recipe`."""
    built_in = RECIPES / f"{recipe.name.removesuffix('.toml')}.toml"
    return built_in if not recipe.exists() and recipe.parent == Path() and built_in.is_file() else recipe


def value_of(config: RunConfig, key: str) -> Any:
    """The value at a dotted key."""
    return reduce(getattr, key.split("."), config)


def with_changes(config: RunConfig, changes: Mapping[str, object]) -> RunConfig:
    """The configuration with other values at these dotted keys, checked again. Raises pydantic's ValidationError."""
    values = config.model_dump()
    for key, value in changes.items():
        _set(values, key, value)
    return RunConfig.model_validate(values)


def render_config(config: RunConfig) -> str:
    """The resolved configuration as TOML that loads back to the same configuration."""
    lines: list[str] = []
    _render_table(config.model_dump(mode="json"), (), lines)
    return "\n".join(lines) + "\n"


def _render_table(table: dict[str, object], path: tuple[str, ...], lines: list[str]) -> None:
    if path:
        lines += ["", f"[{'.'.join(map(_render_key, path))}]"]
    for key, value in table.items():
        if value is None:
            # TOML has no word for absence, and a key nobody sees is a key nobody finds.
            lines.append(f"# {key} is not set")
        elif not isinstance(value, dict):
            lines.append(f"{_render_key(key)} = {_render_value(value)}")
    for key, value in table.items():
        if isinstance(value, dict):
            _render_table(value, (*path, key), lines)


def _render_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _render_value(key)


def _render_value(value: object) -> str:
    """JSON's strings, booleans and arrays are TOML's; so are its numbers, except those that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(path: Path) -> dict[str, object]:
    in_json = path.suffix == ".json"
    try:
        return dict(json.loads(path.read_text())) if in_json else tomllib.loads(path.read_text())
    except FileNotFoundError:
        built_in = sorted(one.stem for one in RECIPES.glob("*.toml"))
        raise ConfigError(
            f"recipe '{path}' does not exist; name a file, or one of {', '.join(built_in)}"
            f"{did_you_mean(path.stem, built_in)}"
        ) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"recipe '{path}' is not {'a JSON object' if in_json else 'TOML'}: {reason(error)}") from None
    except OSError as error:
        raise ConfigError(f"recipe '{path}' cannot be read: {error.strerror}") from None


def _apply(values: dict[str, object], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override '{override}' must look like learner.learning_rate=2e-6")
    try:
        _set(values, key.strip(), _parse_value(text.strip()))
    except ConfigError as error:
        raise ConfigError(f"override '{override}': {error}") from None


def _set(values: dict[str, object], key: str, value: object) -> None:
    *parents, leaf = key.split(".")
    table = values
    for parent in parents:
        child = table.setdefault(parent, {})
        if isinstance(child, str):
            # What a `type` alone stands for.
            child = table[parent] = {"type": child}
        if not isinstance(child, dict):
            raise ConfigError(f"'{parent}' is a value, not a table")
        table = child
    table[leaf] = value


def _parse_value(text: str) -> object:
    """TOML value where it parses as one (numbers, lists, tables, true), the bare text otherwise."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
