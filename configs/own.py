"""Code of one's own that a recipe names as `module:name`: tools, tasks, scorers and losses."""

import asyncio
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

from pydantic import Field

from agentflow import PACKAGES
from configs.api_keys import without_secrets
from configs.errors import UserError

ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""`module:name`; the module is looked for where the recipe lies, and where the command is called."""


class OwnCodeError(UserError):
    """Code that a recipe names cannot be used, or did not do what it is for; the message says which and why."""


def search_in(folder: str | None) -> None:
    """Look for modules in this folder too, and in the current one, after all others: none of them hides a library."""
    for place in (folder and str(Path(folder).absolute()), os.getcwd()):
        if place and place not in sys.path:
            sys.path.append(place)


def load_own(source: str, *, key: str, kind: str = "function") -> Callable[..., Any]:
    """What `source`, a `module:name`, names. `key` is the setting that names it. Raises OwnCodeError."""
    module, _, name = source.partition(":")
    search_in(None)
    try:
        found: object = getattr(importlib.import_module(module), name)
    except Exception as error:
        # A module of somebody else may fail in any way while it is imported.
        said = f"{type(error).__name__}: {error}{_taken(module, error)}"
        raise OwnCodeError(f"{key}: '{source}' cannot be imported: {said}") from error
    if not callable(found):
        raise OwnCodeError(f"{key}: '{source}' is a {type(found).__name__}; name a {kind}")
    return found


def check_call(function: Callable[..., Any], source: str, *, key: str, takes: str, **settings: object) -> None:
    """Whether it can be called with what `takes` lists, such as "task, answer". Raises OwnCodeError."""
    given = [name for name in takes.split(", ") if name]
    try:
        inspect.signature(function).bind(*given, **settings)
    except TypeError as error:
        named = "".join(f", {name}=..." for name in settings)
        raise OwnCodeError(
            f"{key}: '{source}' is called as {source.partition(':')[2]}({takes}{named}) and does not take that: {error}"
        ) from None
    except ValueError:
        # Some callables of C do not tell what they take; the first call will.
        return


def own_function(source: str, *, key: str, takes: str, **settings: object) -> Callable[..., Any]:
    """As `load_own`, a function that can be called as `check_call` says. Raises OwnCodeError."""
    function = load_own(source, key=key)
    check_call(function, source, key=key, takes=takes, **settings)
    return function


def in_a_thread(function: Callable[..., object], /, *given: object, **named: object) -> Awaitable[object]:
    """A thread to itself: one that nobody waits for any more goes on until it ends, or with the process."""
    done: Future[object] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(function(*given, **named))
        except StopIteration as error:
            # A future of asyncio takes none, and whoever awaits it would wait for ever.
            done.set_exception(RuntimeError(f"StopIteration {error}".strip()))
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(done)


def failure(error: BaseException) -> str:
    """What an exception in one's own code was, and in which line, for the middle of a sentence."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(without_secrets(str(error)).split())[:300]}{place}"


def _taken(module: str, error: Exception) -> str:
    """Our packages and libraries hide a module of the same name in the user's folder."""
    name = (error.name if isinstance(error, ModuleNotFoundError) else None) or module
    package = name.partition(".")[0]
    if package in PACKAGES:
        return f"; '{package}' is a package of agentflow and hides your own of this name: give yours another"
    found = getattr(sys.modules.get(package), "__file__", None)
    own = next((file for place in sys.path if (file := Path(place) / f"{package}.py").is_file()), None)
    if found is None or own is None or own.resolve() == Path(found).resolve():
        return ""
    return f"; '{found}' hides '{own}': give yours another name"
