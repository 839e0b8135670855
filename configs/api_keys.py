"""Where API keys come from, where they must not appear, and where they may be sent."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, quote_plus

from pydantic import AfterValidator, HttpUrl, TypeAdapter

from configs.errors import UserError

FILE_SUFFIX = "_FILE"
"""Suffix of the variable that names the file with a key."""
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""This machine, as a URL names it."""

_SECRET_WORDS = {
    *("key", "apikey", "token", "accesstoken", "authtoken", "secret", "password", "passwd", "passphrase", "bearer"),
    *("authorization", "credential", "credentials"),
}
_NO_SECRET_ENDS = {"file", "path", "dir", "env", "var", "type", "limit", "length", "size"}
"""Last words of names that describe a secret but do not hold one, as in `--token-file`."""
_SHORTEST = 8
"""Shorter values are not searched for: they occur in texts by chance."""

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_USER_PART = re.compile(r"://[^/\s?#]*@")
_PASSWORD = re.compile(r"://[^/\s?#@:'\"]*:(?!(?:\$?\{[^{}]*\}|<[^<>]*>|\$\w+|%s|\*+)@)[^/\s?#@'\"]+@")
"""A password in a URL, except a reference to one: `${NAME}`, `{name}` of Python, `<password>`."""
_NAMED_VALUE = re.compile(r"(?P<name>[A-Za-z][\w-]*)['\"]?\s*[=:]\s*['\"]?(?=(?P<value>[^\s'\"&]+))")
_FLAG_VALUE = re.compile(r"(?<!\S)-{1,2}(?P<name>[A-Za-z][\w-]*)\s+['\"]?(?P<value>[^\s'\"&-][^\s'\"&]*)")
_KNOWN_START = re.compile(
    r"(?<![A-Za-z0-9])(sk-|sk_|pk_live_|gh[oprsu]_|github_pat_|glpat-|hf_|tvly-|AIza|xox[abps]-|xapp-|AKIA|ASIA|npm_|pypi-"
    r"|dckr_pat_|gsk_|nvapi-|xai-|pplx-|lsv2_|eyJ(?=[\w-]+\.))[\w-]{12,}"
)
_KEY_BODY = re.compile(r"(?=[A-Za-z]*\d)[A-Za-z0-9]{10}")
"""Part of nearly every key, but of no name like `hf_transformers_loader`."""
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]{0,20}PRIVATE KEY|^PuTTY-User-Key-File-\d", re.MULTILINE)
_ASSIGNED = re.compile(
    # A name like `secret_access_key`, and 20 or more letters and digits that are not words in CamelCase.
    r"(?i:(?<=[a-z_-])key|token|secret|passw(?:or)?d|credential)['\"]?\s{0,3}[=:]\s{0,3}['\"]?"
    r"(?=[a-zA-Z/+_-]{0,99}\d)(?=[a-z\d/+_-]{0,99}[A-Z])(?=[A-Z\d/+_-]{0,99}[a-z])"
    r"(?!(?:[A-Z]?[a-z]{2,}+\d*+[_-]?)+\b)[\w/+-]{20,}={0,2}(?![\w.(\[])"
)
_RANDOM_WORD = re.compile(r"(?<![^\s'\"=])(?=(?:[\w-]*\d){4})(?=(?:[\w-]*[A-Za-z]){4})[\w-]{32,}(?![^\s'\"&])")
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_URL = TypeAdapter(HttpUrl)
_used: set[str] = set()
"""Variables that this process read a key from, whatever their names."""


def _plain(base_url: str) -> str:
    url = _URL.validate_python(base_url)
    if url.username or url.password or url.query or url.fragment:
        raise ValueError("base_url must have no user, password, query or fragment; a key belongs in api_key_env")
    return base_url.rstrip("/")


PlainUrl = Annotated[str, AfterValidator(_plain)]
"""The root of a server: an address that can hold no key."""


class ApiKeyError(UserError):
    """A key is missing or unusable; the message names the variable or the file, never the key."""


def find_key(variable: str) -> str | None:
    """Return the key in a variable, else in the file that VARIABLE_FILE names, or None. Raises ApiKeyError."""
    _used.add(variable)
    key, source = os.environ.get(variable, "").strip(), variable
    if not key and (path := key_file(variable)):
        source = f"the file that {variable}{FILE_SUFFIX} names, '{path}',"
        _spellings_at.cache_clear()  # it may hold a new key
        try:
            key = path.read_text(encoding="utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not a text"
            raise ApiKeyError(f"{source} cannot be read: {why}") from None
        if not key:
            raise ApiKeyError(f"{source} is empty; write the key into it")
    # The HTTP client's error about an invalid header would quote the key.
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ApiKeyError(f"{source} holds no API key: it has a character that keys cannot contain")
    return key or None


def required_key(name: str, variable: str, otherwise: str) -> str:
    """Return the key of `name`, a tool or setting; else raise ApiKeyError, which says how to do `otherwise`."""
    if (key := find_key(variable)) is None:
        raise ApiKeyError(f"{name} needs {variable}: {how_to_set(variable)}, {otherwise}")
    return key


def key_file(variable: str) -> Path | None:
    """Return the path in VARIABLE_FILE."""
    path = os.environ.get(f"{variable}{FILE_SUFFIX}", "").strip()
    return Path(path).expanduser() if path else None


def secret_files() -> dict[str, Path]:
    """Return the key files of all variables in the environment that have the name of a secret."""
    names = (name.removesuffix(FILE_SUFFIX) for name in os.environ if name.endswith(FILE_SUFFIX))
    return {name: path for name in names if names_a_secret(name) and (path := key_file(name))}


def how_to_set(variable: str) -> str:
    """Return the advice how to provide a key, as a part of a sentence."""
    return f"set {variable} in the environment, or {variable}{FILE_SUFFIX} to the path of a file that holds the key"


def names_a_secret(name: str) -> bool:
    """Return whether a variable, field or option of this name holds a secret: `HF_TOKEN`, `--api-key`, `apiKey`."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return bool(words) and words[-1] not in _NO_SECRET_ENDS and not _SECRET_WORDS.isdisjoint(words)


def written_secret(text: str, named: Iterable[str] = ()) -> str | None:
    """Return the variable, with a secret's name or in `named`, whose value occurs in the text, or None."""
    return next((name for name, value in _secrets(named).items() if value in text), None)


def without_secrets(text: str) -> str:
    """Replace the values of secret variables and key files by `[NAME]`, also where a URL or JSON holds them escaped."""
    for spelling, name in _spellings():
        text = text.replace(spelling, f"[{name}]")
    return text


def redact_output() -> None:
    """Redact what this process prints and logs from now on, also through loggers that hold its streams already."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "__dict__") and "write" not in vars(stream):
            vars(stream)["write"] = partial(_write_redacted, stream.write)


def _write_redacted(write: Callable[[str], int], text: str) -> int:
    write(without_secrets(text))
    return len(text)


def _spellings() -> list[tuple[str, str]]:
    """Return what occurs in texts for the values of secrets, the longest first, with the names of the secrets."""
    # Programs print many short texts, so what to look for is found again only when it may be different.
    return _spellings_at((*vars(os.environ)["_data"].items(), len(_used), int(time.monotonic())))


@lru_cache(maxsize=1)
def _spellings_at(state: tuple[object, ...]) -> list[tuple[str, str]]:
    found = {}
    for name, value in _secrets().items():
        raw = os.fsencode(value)  # a variable may hold any bytes
        for spelling in (value, quote(raw, safe=""), quote_plus(raw), json.dumps(value)[1:-1], repr(value)[1:-1]):
            found[spelling] = name
    return sorted(found.items(), key=lambda item: -len(item[0]))


def _secrets(named: Iterable[str] = ()) -> dict[str, str]:
    values = {name: value.strip() for name, value in os.environ.items() if names_a_secret(name)}
    for name in {*secret_files(), *named, *_used}:
        # The file may exist on other machines only. A pipe is left to its first reader, who gets its content.
        if (path := key_file(name)) is None or path.is_file():
            with suppress(ApiKeyError):
                values[name] = find_key(name) or ""
    return {name: value for name, value in values.items() if len(value) >= _SHORTEST}


def exposed_key(text: str) -> str | None:
    """Return where a URL or command line seems to hold a key, or None, as for a path or a reference like `${NAME}`."""
    if _USER_PART.search(text):
        return "in the user part of the URL"
    for match in (*_NAMED_VALUE.finditer(text), *_FLAG_VALUE.finditer(text)):
        if names_a_secret(match["name"]) and not match["value"].startswith(("$", "/", "./", "../", "~")):
            return f"as '{match['name']}'"
    if known := _known_key(text):
        return known
    if any(not _UUID.fullmatch(match[0]) for match in _RANDOM_WORD.finditer(text)):
        return "in a word of 32 or more letters and digits"
    return None


def certain_key(text: str) -> str | None:
    """Return where a text certainly holds a key: a password in a URL, a private key, a key of a known form or name."""
    if _PASSWORD.search(text):
        return "in the user part of a URL"
    if _PRIVATE_KEY.search(text):
        return "a private key"
    return _known_key(text, _KEY_BODY) or ("behind a name of keys" if _ASSIGNED.search(text) else None)


def key_in_file(path: Path) -> tuple[int, str] | None:
    """Return the first line of a file with a secret of the environment or a certain key, and where it is; or None."""
    before = 0
    with path.open("rb") as file:
        while lines := file.readlines(1 << 20):
            # UTF-16 is ASCII with NUL bytes between.
            texts = [line.replace(b"\0", b"").decode(errors="replace") for line in lines]
            if found := _written_or_certain("".join(texts)):
                exact = ((number, where) for number, text in enumerate(texts) if (where := _written_or_certain(text)))
                number, where = next(exact, (0, found))
                return before + number + 1, where
            before += len(lines)
    return None


def _written_or_certain(text: str) -> str | None:
    return written_secret(text) or certain_key(text)


def _known_key(text: str, body: re.Pattern[str] = _KNOWN_START) -> str | None:
    known = next((match for match in _KNOWN_START.finditer(text) if body.search(match[0])), None)
    return f"in the word that begins with '{known[1]}'" if known else None


def on_this_machine(address: str) -> bool:
    """Return whether an address is a loopback address; raises pydantic's ValidationError for an invalid one."""
    return _URL.validate_python(address).host in LOOPBACK_HOSTS


def in_clear_text(address: str) -> bool:
    """Return whether a key sent to this address could be read in transit."""
    return _URL.validate_python(address).scheme != "https" and not on_this_machine(address)
