"""Custom code that a recipe names as `module:name`: agents, tools, tasks, scorers and losses."""

import asyncio
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

from pydantic import AfterValidator

from configs import PACKAGES
from configs.api_keys import redact_output, without_secrets
from configs.errors import UserError


def code_or(other: str, advice: str) -> AfterValidator:
    """Return the check of a text that is `module:name`, or matches the expression `other`."""

    def check(source: str) -> str:
        named = re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", source) and ".py:" not in source
        if not named and not re.fullmatch(other, source):
            raise ValueError(f"must be module:name of custom code, such as my_code:name for a file my_code.py{advice}")
        return source

    return AfterValidator(check)


ImportPath = Annotated[str, code_or(r"(?!)", "")]
"""`module:name`; modules are searched next to the recipe and in the current folder."""


class OwnCodeError(UserError):
    """Custom code cannot be loaded, has the wrong signature, or failed; the message says which and why."""


_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(f"{Path(__file__).parents[1] / package}{os.sep}" for package in PACKAGES),
    "<",
)


def search_in(folder: str | None) -> None:
    """Append a folder and the current one to the import path, behind all libraries, and redact what code prints."""
    redact_output()
    for place in (folder and str(Path(folder).absolute()), os.getcwd()):
        if place and place not in sys.path:
            sys.path.append(place)


def load_own(source: str, *, key: str, kind: str = "function") -> Callable[..., Any]:
    """Import the callable `source`, a `module:name`, of the setting `key`. Raise OwnCodeError if it is no `kind`."""
    module, _, name = source.partition(":")
    search_in(None)
    try:
        loaded: object = getattr(importlib.import_module(module), name)
    except Exception as error:
        # Importing a user's module can raise anything.
        package = ((error.name if isinstance(error, ImportError) else None) or module).partition(".")[0]
        advice = f"; '{package}' is a package of agentflow and hides yours: rename it" if package in PACKAGES else ""
        if type(error).__name__ in ("OpenAIError", "AnthropicError"):
            given = "make no client at import: an agent is given one that calls the policy"
            advice = f"; {given if key == 'agent.function' else 'set the key that its client needs'}"
        # Without the cause, whose message Ray and Python would print with the traceback.
        raise OwnCodeError(f"{key}: '{source}' cannot be imported: {failure(error)}{advice}") from None
    if not callable(loaded):
        raise OwnCodeError(f"{key}: '{source}' is a {type(loaded).__name__}; name a {kind}")
    return loaded


def check_call(function: Callable[..., object], source: str, *, key: str, takes: str, **settings: object) -> None:
    """Raise OwnCodeError if the function refuses the arguments in `takes`, such as "task, answer", or the settings."""
    try:
        inspect.signature(function).bind(*filter(None, takes.split(", ")), **settings)
    except TypeError as error:
        call = f"{source.partition(':')[2]}({takes}{''.join(f', {name}=...' for name in settings)})"
        why = f"'{source}' is called as {call}, but its signature differs: {failure(error)}"
        raise OwnCodeError(f"{key}: {why}") from None
    except ValueError:
        pass  # some builtins have no signature


def own_function(source: str, *, key: str, takes: str, **settings: object) -> Callable[..., Any]:
    """Load a custom function and check its signature; see `load_own` and `check_call`."""
    function = load_own(source, key=key)
    check_call(function, source, key=key, takes=takes, **settings)
    return function


def in_a_thread(function: Callable[..., object], /, *args: object, **kwargs: object) -> Awaitable[object]:
    """Run a function in a daemon thread of its own, so that a call that hangs blocks neither others nor the exit."""
    done: Future[object] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(function(*args, **kwargs))
        except BaseException as error:
            # An asyncio future never delivers StopIteration, and what is no Exception ends the caller's event loop.
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            wrapped = RuntimeError(f"{type(error).__name__} {error}".strip()).with_traceback(error.__traceback__)
            done.set_exception(error if is_plain else wrapped)

    Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(done)


def failure(error: BaseException) -> str:
    """Format an exception from custom code as "Type: message (file, line n)", without secrets.

    The place is the last in the user's own code if there is one in the traceback, else the last of all.
    """
    every = traceback.extract_tb(error.__traceback__)
    frames = [one for one in every if not one.filename.startswith(_LIBRARIES)] or every
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(without_secrets(str(error)).split())[:300]}{place}"
