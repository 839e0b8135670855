"""The keys that a recipe names: whether they are here, and written nowhere."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.api_keys import ApiKeyError, certain_key, find_key, how_to_set, written_secret
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


def check_nothing_secret_is_written(config: RunConfig, words: Sequence[str] = ()) -> None:
    """Run folder, report and process list show settings and command, and further `words` of it. Raises ApiKeyError
    where they hold the value of a variable that has the name of a secret or that the recipe names, or what can only be
    a key."""
    text = "\n".join((*_texts_of(config.model_dump(mode="json")), *sys.argv, *words))
    if name := written_secret(text, key_variables(config)):
        raise ApiKeyError(
            f"the settings or the command hold the value of {name}, and the run folder would show it; take it out, and "
            f"name {name} with the setting's api_key_env"
        )
    if where := certain_key(text):
        raise ApiKeyError(
            f"the settings or the command hold a key {where}, and the run folder would show it; take it out, put it "
            "into an environment variable, and name that one with the setting's api_key_env"
        )


def _texts_of(value: object) -> Iterator[str]:
    """Every text in the settings, also names that their user chose."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        for one in value:
            yield from _texts_of(one)
    elif isinstance(value, str):
        yield value


def _values_of(table: Mapping[str, Any], key: str) -> list[str]:
    found: list[str] = []
    for name, value in table.items():
        if name == key and value:
            found.append(value)
        elif isinstance(value, Mapping):
            found += _values_of(value, key)
    return found
