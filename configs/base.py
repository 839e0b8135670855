"""The base of every configuration model: frozen, and a key nobody declared is an error."""

import os
from collections.abc import Mapping
from typing import Annotated, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

OwnPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A file or a folder; `~` is the home of whoever calls the command."""


def no_truth(value: object) -> object:
    """For a number: Python takes true for 1; what it is called is no number."""
    return str(value).lower() if isinstance(value, bool) else value


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        return {key: no_truth(value) if cls._is_number(key) else value for key, value in values.items()}

    @classmethod
    def _is_number(cls, key: object) -> bool:
        field = cls.model_fields.get(str(key))
        return field is not None and not {int, float}.isdisjoint((field.annotation, *get_args(field.annotation)))


def typed(default: str, **by_key: str) -> BeforeValidator:
    """For a union that a `type` tells apart: a text is a table with this `type` alone. A table without one has the type
    that `by_key` gives for a key in it, else `default`. A setting exists only in the types in which it has an
    effect."""

    def with_type(value: object) -> object:
        if isinstance(value, str):
            return {"type": value}
        if not isinstance(value, Mapping):
            return value
        return {"type": next((by_key[key] for key in by_key if key in value), default), **value}

    return BeforeValidator(with_type)


def types_of(annotation: object) -> dict[str, type[Config]]:
    """The models of such a union by their `type`; empty for any other annotation."""
    models = [part for part in get_args(annotation) if isinstance(part, type) and issubclass(part, Config)]
    found = {
        name: model
        for model in models
        if "type" in model.model_fields
        for name in get_args(model.model_fields["type"].annotation)
    }
    return found if len(found) > 1 else {}
