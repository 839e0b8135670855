"""Loading of a TOML recipe with dotted overrides into a checked RunConfig, with one-line errors."""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from itertools import takewhile
from pathlib import Path
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.base import types_of
from configs.errors import UserError, did_you_mean, reason
from configs.plugins import search_in
from configs.run import RunConfig

RECIPES = Path(__file__).with_name("recipes")
DEFAULT_RECIPE = RECIPES / "demo_cpu.toml"

_NEVER_QUOTED = {"address", "api_key_env", "base_url", "command", "source", "url"}
"""Settings that may contain a key by mistake."""

_SHAPES = {
    "dict_type": "must be a table, such as { name = 1.0 }",
    "model_attributes_type": "must be a table",
    "tuple_type": "must be a list, written in brackets",
}
"""What pydantic's names of Python types mean in a recipe."""

ELSEWHERE: Mapping[str, str] = {
    "num_generations": "rollout.group_size",
    "n": "rollout.group_size",
    "rollouts_per_example": "rollout.group_size",
    "train_batch_size": "batch_groups",
    "per_device_train_batch_size": "batch_groups",
    "gradient_accumulation_steps": "batch_groups",
    "max_completion_length": "rollout.max_turn_tokens",
    "max_tokens": "rollout.max_turn_tokens",
    "max_prompt_length": "rollout.engine.max_model_len",
    "max_response_length": "rollout.max_turn_tokens",
    "max_train_steps": "num_steps",
    "num_train_epochs": "num_steps",
    "total_training_steps": "num_steps",
    "max_async_level": "pipeline_depth",
    "staleness_threshold": "max_staleness",
    "lr": "learner.learning_rate",
    "learning_rate": "learner.learning_rate",
    "beta": "learner.loss.kl_weight",
    "kl_loss_coef": "learner.loss.kl_weight",
    "epsilon": "learner.loss.clip_low",
    "clip_ratio_low": "learner.loss.clip_low",
    "epsilon_high": "learner.loss.clip_high",
    "clip_ratio_high": "learner.loss.clip_high",
    "loss_type": "learner.loss.type",
    "r": "model.lora_rank",
    "target_modules": "model.lora_targets",
    "reward_funcs": "reward.scorer",
    "eval_steps": "evaluation.every_steps",
    "test_freq": "evaluation.every_steps",
    "save_steps": "learner.checkpoint_every",
    "save_freq": "learner.checkpoint_every",
    "report_to": "trackers",
    "gpu_memory_utilization": "rollout.engine.kv_cache_gib",
    "vllm_gpu_memory_utilization": "rollout.engine.kv_cache_gib",
}
"""Settings of TRL, verl and prime-rl by the last part of their names, and the settings that do the same here."""


def split_arguments(given: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    """Return the recipe and the overrides, which may come in any order.

    A word without `=`, or with a slash before it, is a recipe; without one it is recipe.toml here, or the CPU demo.
    """
    overrides = tuple(word for word in given if "=" in word and "/" not in word.partition("=")[0])
    recipes = [word for word in given if word not in overrides]
    if len(recipes) > 1:
        raise UserError(f"unrecognized arguments: {' '.join(recipes[1:])}; the recipe is '{recipes[0]}'")
    here = Path("recipe.toml")
    return Path(recipes[0]) if recipes else here if here.exists() else DEFAULT_RECIPE, overrides


def _found(recipe: Path) -> Path:
    if (recipe / "config.json").is_file():
        return recipe / "config.json"
    built_in = RECIPES / f"{recipe.name.removesuffix('.toml')}.toml"
    return built_in if recipe.parent == Path() and built_in.is_file() and not recipe.exists() else recipe


def opening_comment(recipe: Path) -> str:
    """Return the comment at the top of a recipe, which says what it does and how long that takes."""
    lines = takewhile(lambda line: line.startswith("#"), _found(recipe).read_text(encoding="utf-8-sig").splitlines())
    return "\n".join(line.strip("# ") for line in lines)


def load_run_config(recipe: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe, apply `a.b=value` overrides in order, and validate. Raise UserError for what cannot be used.

    `recipe` is a file, a run's folder or its config.json, or the name of a built-in recipe unless a file has this name.
    """
    path = recipe and _found(recipe)
    values = _read(path) if path else {}
    written: dict[str, str] = {}
    for override in overrides:
        key, separator, text = map(str.strip, override.partition("="))
        if not separator or not key:
            raise UserError(f"override '{override}' must look like learner.learning_rate=2e-6")
        written[key] = text
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            value = text  # a bare text is a string
        set_value(values, key, value)
    try:
        config = _validated(values, written)
    except ValidationError as error:
        # A default that depends on a wrong setting is no mistake of its own.
        wrong = (detail for detail in error.errors() if detail["type"] != "default_factory_not_called")
        raise UserError("; ".join(map(_describe, wrong))) from None
    if path and path.suffix != ".json":
        if config.names_code and config.code_path is None:
            config = config.model_copy(update={"code_path": str(path.parent)})
        for name, own in config.envs.datasets.items():
            if own.is_file and not Path(own.source).exists() and (beside := path.parent / own.source).exists():
                config.envs.datasets[name] = own.model_copy(update={"source": str(beside)})
    search_in(config.code_path)
    return config


def _validated(values: dict[str, object], written: Mapping[str, str]) -> RunConfig:
    """Return the configuration of `values`; a number or a date given for a text is the text that was `written`."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        wrong = {_dotted_key(one["loc"]): one["input"] for one in error.errors() if one["type"] == "string_type"}
        # A boolean for a text is a mistake more likely than a name.
        texts = [key for key, value in wrong.items() if key in written and not isinstance(value, bool | list | dict)]
        if not texts:
            raise
        for key in texts:
            set_value(values, key, written[key])
        return RunConfig.model_validate(values)


def render_config(config: RunConfig) -> str:
    """Return the resolved configuration as TOML with the keys of overrides; it loads back to the same configuration."""
    return "".join(f"{line}\n" for line in _render_table(config.model_dump(mode="json"), ""))


def _render_table(table: Mapping[str, object], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        name = prefix + (key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _render_value(key))
        if isinstance(value, dict) and value:
            yield from _render_table(value, f"{name}.")
        else:
            # TOML has no null; the comment shows that the key exists.
            yield f"# {name} is not set" if value is None else f"{name} = {_render_value(value)}"


def _render_value(value: object) -> str:
    # JSON's strings, booleans, arrays and finite numbers are valid TOML.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(path: Path) -> dict[str, object]:
    in_json = path.suffix == ".json"
    try:
        text = path.read_text(encoding="utf-8-sig")
        return dict(json.loads(text)) if in_json else tomllib.loads(text)
    except FileNotFoundError:
        built_in = sorted(file.stem for file in RECIPES.glob("*.toml"))
        raise UserError(
            f"recipe '{path}' does not exist; name a file, or one of {', '.join(built_in)}"
            f"{did_you_mean(path.stem, built_in)}"
        ) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"recipe '{path}' is not {'a JSON object' if in_json else 'TOML'}: {reason(error)}") from None


def set_value(values: dict[str, object], key: str, value: object) -> None:
    """Set the value of a dotted key in nested tables. Raise UserError where a part of it is no table."""
    *parents, leaf = key.split(".")
    table = values
    for parent in parents:
        child = table.setdefault(parent, {})
        if isinstance(child, str):
            # A text stands for a table with this `type` alone.
            child = table[parent] = {"type": child}
        if not isinstance(child, dict):
            raise UserError(f"{key}: '{parent}' is a value, not a table")
        table = child
    table[leaf] = value


def _describe(detail: ErrorDetails) -> str:
    """Return pydantic's message with the dotted key in front and the rejected value behind it."""
    key = _dotted_key(detail["loc"])
    if detail["type"] == "extra_forbidden":
        known = list(setting_names(RunConfig))
        if key in known:
            return f"unknown key '{key}': type = '{detail['loc'][-2]}' does not have it"
        last, inside = key.rpartition(".")[2], detail.get("input")
        while isinstance(inside, dict) and len(inside) == 1:
            ((last, inside),) = inside.items()
        if last in ("load_in_4bit", "load_in_8bit"):
            return f"unknown key '{key}': weights are not quantized in training; leave it out"
        if elsewhere := ELSEWHERE.get(last):
            return f"unknown key '{key}': here it is {elsewhere}"
        near = did_you_mean(key, known) or "; `agentflow check --print` prints every key that exists"
        return f"unknown key '{key}'{near}"
    message = _SHAPES.get(detail["type"]) or detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "model_type":
        inside = [name for name in setting_names(RunConfig) if name.startswith(f"{key}.")]
        message = f"must be a table; set {', '.join(inside[:3])}{', ...' if len(inside) > 3 else ''}"
    value = detail.get("input")
    if isinstance(value, dict) or not _NEVER_QUOTED.isdisjoint(detail["loc"]):
        return f"{key}: {message}"
    if detail["type"] == "string_type":
        message += "; a name that looks like something else is put into quotes"
    shown = str(value) if isinstance(value, date | time) else json.dumps(value, default=str)
    return f"{key}: {message} (got {shown})"


def _dotted_key(location: tuple[str | int, ...]) -> str:
    """Return the location of an error without the union types that pydantic puts between the keys."""
    keys: list[str] = []
    model: type[BaseModel] | None = RunConfig
    types: Mapping[str, type[BaseModel]] = {}
    for part in map(str, location):
        if part in types:
            model, types = types[part], {}
            continue
        keys.append(part)
        if model and (field := model.model_fields.get(part)):
            types = types_of(field.annotation)
            model = None if types else next(iter(_models_of(field.annotation)), None)
    return ".".join(keys) or "recipe"


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings; NAME stands for the names in a table that the user chooses."""
    for name, field in model.model_fields.items():
        models = _models_of(field.annotation)
        below = f"{prefix}{name}.NAME." if get_origin(field.annotation) is dict else f"{prefix}{name}."
        yield from dict.fromkeys(setting for inner in models for setting in setting_names(inner, below))
        if not models:
            yield prefix + name


def _models_of(annotation: object) -> list[type[BaseModel]]:
    parts = (annotation, *get_args(annotation))
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
