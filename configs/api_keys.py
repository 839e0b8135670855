"""API keys: where they come from, where they must not stand, and where they may be sent."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, quote_plus

from pydantic import AfterValidator, HttpUrl, TypeAdapter

from configs.errors import UserError

FILE_SUFFIX = "_FILE"
"""Of the variable that names the file with a key."""

_SECRET_WORDS = {
    *("key", "apikey", "token", "accesstoken", "authtoken", "secret", "password", "passwd", "passphrase", "bearer"),
    *("authorization", "credential", "credentials"),
}
_NO_SECRET_ENDS = {"file", "path", "dir", "env", "var", "type", "limit", "length", "size"}
"""A name that ends so tells of a secret, as `--token-file` does, and is none."""

_SHORTEST = 8
"""A shorter value stands in a text by chance."""

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_USER_PART = re.compile(r"://[^/\s?#]*@")
_PASSWORD = re.compile(r"://[^/\s?#@:'\"]*:(?!\$\{\w+\}@)[^/\s?#@'\"]+@")
_NAMED_VALUE = re.compile(r"(?P<name>[A-Za-z][\w-]*)['\"]?\s*[=:]\s*['\"]?(?=(?P<value>[^\s'\"&]+))")
_FLAG_VALUE = re.compile(r"(?<!\S)-{1,2}(?P<name>[A-Za-z][\w-]*)\s+['\"]?(?P<value>[^\s'\"&-][^\s'\"&]*)")
_KNOWN_START = re.compile(
    r"(?<![A-Za-z0-9])(sk-|sk_|pk_live_|gh[opsu]_|github_pat_|glpat-|hf_|tvly-|AIza|xox[abps]-|AKIA|eyJ)[\w-]{12,}"
)
_KEY_BODY = re.compile(r"(?=[A-Za-z]*\d)[A-Za-z0-9]{10}")
"""Stands in next to every key, and in no name like `hf_transformers_loader`."""
_RANDOM_WORD = re.compile(r"(?<![^\s'\"=])(?=(?:[\w-]*\d){4})(?=(?:[\w-]*[A-Za-z]){4})[\w-]{32,}(?![^\s'\"&])")
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

_URL = TypeAdapter(HttpUrl)
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""This machine, as a URL names it."""


def _plain(base_url: str) -> str:
    url = _URL.validate_python(base_url)
    if url.username or url.password or url.query or url.fragment:
        raise ValueError("base_url must hold no user, password, query or fragment; a key belongs in api_key_env")
    return base_url.rstrip("/")


PlainUrl = Annotated[str, AfterValidator(_plain)]
"""The root of a server: an address that can hold no key."""


class ApiKeyError(UserError):
    """There is no key where one is said to be; the message names the variable or the file, never the key."""


def find_key(variable: str) -> str | None:
    """The key in an environment variable, else in the file whose path VARIABLE_FILE holds; None where both are unset.
    Raises ApiKeyError."""
    key, source = os.environ.get(variable, "").strip(), variable
    if not key and (path := key_file(variable)):
        source = f"the file that {variable}{FILE_SUFFIX} names, '{path}',"
        try:
            key = Path(path).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ApiKeyError(f"{source} cannot be read: {reason}") from None
        if not key:
            raise ApiKeyError(f"{source} is empty; write the key into it")
    # What a header cannot carry would be quoted, key and all, by the HTTP client's own error.
    if not (key.isascii() and key.isprintable() and " " not in key) and key:
        raise ApiKeyError(f"{source} holds no API key: it has a character that no key has")
    return key or None


def key_file(variable: str) -> str | None:
    """The path of the file that is to hold the key, as VARIABLE_FILE says it."""
    return os.environ.get(f"{variable}{FILE_SUFFIX}", "").strip() or None


def secret_files() -> dict[str, str]:
    """The paths that `key_file` gives, by variable: of all in this environment with the name of a secret."""
    names = (name.removesuffix(FILE_SUFFIX) for name in os.environ if name.endswith(FILE_SUFFIX))
    return {name: path for name in names if names_a_secret(name) and (path := key_file(name))}


def how_to_set(variable: str) -> str:
    """What to do, as a part of a sentence."""
    return f"set {variable} in the environment, or {variable}{FILE_SUFFIX} to the path of a file that holds the key"


def names_a_secret(name: str) -> bool:
    """Whether a variable, field or option of this name holds a secret: `HF_TOKEN`, `--api-key`, `tavilyApiKey`."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return bool(words) and words[-1] not in _NO_SECRET_ENDS and not _SECRET_WORDS.isdisjoint(words)


def written_secret(text: str, named: Iterable[str] = ()) -> str | None:
    """The variable whose value stands in the text, None without: one of this environment with the name of a secret, or
    one of those `named` for keys. The value may be in a file."""
    return next((name for name, value in _secrets(named).items() if value in text), None)


def without_secrets(text: str) -> str:
    """With `[NAME]` in the place of what a variable with the name of a secret holds, or the file that NAME_FILE names,
    also as a URL spells it."""
    for name, value in sorted(_secrets().items(), key=lambda one: -len(one[1])):
        for spelled in (value, quote(value, safe=""), quote_plus(value)):
            text = text.replace(spelled, f"[{name}]")
    return text


def _secrets(named: Iterable[str] = ()) -> dict[str, str]:
    values = {name: value.strip() for name, value in os.environ.items() if names_a_secret(name)}
    # A pipe would give its key away only once, to whoever reads it first.
    in_files = [name for name, path in secret_files().items() if Path(path).expanduser().is_file()]
    for name in (*in_files, *named):
        # A file that only other machines have is not read here.
        with suppress(ApiKeyError):
            values[name] = find_key(name) or ""
    return {name: value for name, value in values.items() if len(value) >= _SHORTEST}


def exposed_key(text: str) -> str | None:
    """Where a URL or a command line holds what looks like a key, in words without the key; None where nowhere.

    Told by the user part of a URL, by the name of a field or option, by how keys of known services begin, and by 32 or
    more letters and digits that stand alone. A reference like `${NAME}` and a path are no keys.
    """
    if _USER_PART.search(text):
        return "in the user part of the URL"
    for found in (*_NAMED_VALUE.finditer(text), *_FLAG_VALUE.finditer(text)):
        if names_a_secret(found["name"]) and not found["value"].startswith(("$", "/", "./", "../", "~")):
            return f"as '{found['name']}'"
    if known := _known_key(text):
        return known
    if any(not _UUID.fullmatch(found[0]) for found in _RANDOM_WORD.finditer(text)):
        return "in a word of 32 or more letters and digits"
    return None


def certain_key(text: str) -> str | None:
    """As `exposed_key`, of what can hardly be anything else: a password in a URL that is no reference like `${NAME}`,
    and how keys of known services begin."""
    if _PASSWORD.search(text):
        return "in the user part of a URL"
    return _known_key(text, _KEY_BODY)


def _known_key(text: str, body: re.Pattern[str] = _KNOWN_START) -> str | None:
    """`body` stands in the whole word."""
    known = next((found for found in _KNOWN_START.finditer(text) if body.search(found[0])), None)
    return f"in the word that begins with '{known[1]}'" if known else None


def on_this_machine(address: str) -> bool:
    """Raises pydantic's ValidationError for what is no address."""
    return _URL.validate_python(address).host in LOOPBACK_HOSTS


def in_clear_text(address: str) -> bool:
    """Whether a key that is sent there could be read on the way. Raises pydantic's ValidationError."""
    return _URL.validate_python(address).scheme != "https" and not on_this_machine(address)
