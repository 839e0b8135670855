"""The keys that a recipe names: whether they are here, and written nowhere."""

import shlex
import sys
from collections.abc import Mapping
from typing import Any

from configs.api_keys import ApiKeyError, find_key, how_to_set, written_secret
from configs.reward import JudgeLabelConfig
from configs.run import RunConfig


def key_variables(config: RunConfig) -> tuple[str, ...]:
    """The environment variables with keys that this recipe names, by itself or by the tools that it switches on."""
    from envs.tools import web_search as pages

    named = _values_of(config.model_dump(), "api_key_env")
    envs = config.envs
    finders = {envs.web.finder} if "web_search" in envs.actions else set()
    if ("search" in envs.actions and envs.search == "tavily") or "tavily" in finders:
        named.append(pages.TAVILY_KEY_VARIABLE)
    if "google_search" in envs.actions or "google" in finders:
        named += [pages.GOOGLE_KEY_VARIABLE, pages.ENGINE_VARIABLE]
    return tuple(dict.fromkeys(named))


def check_judge_key(config: RunConfig) -> None:
    """Whether this machine has the key of the judge that labels. Raises ApiKeyError."""
    if isinstance(config.label, JudgeLabelConfig):
        check_key("label.judge.api_key_env", config.label.judge.api_key_env)


def check_key(setting: str, variable: str | None) -> None:
    """Whether there is a key where `setting` says. Raises ApiKeyError."""
    try:
        if variable is None or find_key(variable):
            return
    except ApiKeyError as error:
        raise ApiKeyError(f"{setting}: {error}") from None
    raise ApiKeyError(
        f"{setting} names {variable}, which is not set; {how_to_set(variable)}, or leave it out for a server that "
        "needs no key"
    )


def check_nothing_secret_is_written(config: RunConfig) -> None:
    """Run folder, report and process list show settings and command. Raises ApiKeyError where they hold the value of a
    variable that has the name of a secret."""
    if name := written_secret(f"{config.model_dump_json()}\n{shlex.join(sys.argv)}"):
        raise ApiKeyError(
            f"the settings or the command hold the value of {name}, and the run folder would show it; take it out, and "
            f"name {name} with the setting's api_key_env"
        )


def _values_of(table: Mapping[str, Any], key: str) -> list[str]:
    found: list[str] = []
    for name, value in table.items():
        if name == key and value:
            found.append(value)
        elif isinstance(value, Mapping):
            found += _values_of(value, key)
    return found
