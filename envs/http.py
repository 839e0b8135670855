"""How a service outside is asked: at an even pace, again after a passing failure, within limits of time and size."""

import asyncio
import json
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, TypeVar

import httpx

from envs.types import ToolUnavailableError

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """The bounds of one call. The time limit covers all attempts and the pauses between them.

    `requests_per_minute` holds for all calls of one process, `max_bytes` for one answer after decompression.
    """

    max_attempts: int = 4
    attempt_limit_s: float = 10.0
    time_limit_s: float = 30.0
    first_pause_s: float = 0.5
    requests_per_minute: float = 60.0
    max_bytes: int = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An attempt without an answer. `reason` holds no word of the server's, for it may quote a key.

    `passing`: the same request may succeed later, after `wait_s` at the soonest. `bad_query`: the service takes the
    query for a wrong one.
    """

    reason: str
    passing: bool = False
    wait_s: float = 0.0
    bad_query: bool = False


class QueryRefusedError(ValueError):
    """The service takes this query for a wrong one: the caller's doing."""


class Pace:
    """An even row of starts for all calls of one process."""

    def __init__(self, per_minute: float) -> None:
        self._apart_s = 60 / per_minute
        self._next_start = 0.0

    async def turn(self) -> None:
        """Waits for this caller's start."""
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + self._apart_s
        if start > now:
            await asyncio.sleep(start - now)


class Service:
    """One service. `name` stands in its errors."""

    def __init__(self, name: str, limits: ServiceLimits) -> None:
        self.limits = limits
        self._name = name
        self._pace = Pace(limits.requests_per_minute)

    async def ask(self, attempt: Callable[[], Awaitable[Answer | Failure]]) -> Answer:
        """What the first attempt with an answer gives. Raises ToolUnavailableError when none does, and
        QueryRefusedError when it is the query's fault."""
        await self._pace.turn()
        try:
            async with asyncio.timeout(self.limits.time_limit_s):
                outcome = await self._attempts(attempt)
        except TimeoutError:
            outcome = Failure(reason=f"gave no answer within {self.limits.time_limit_s} s")
        # Raised here and not in an `except`: a client's error may hold the key, and would stay attached to this one.
        if isinstance(outcome, Failure):
            if outcome.bad_query:
                raise QueryRefusedError(outcome.reason)
            raise ToolUnavailableError(f"{self._name} {outcome.reason}")
        return outcome

    async def _attempts(self, attempt: Callable[[], Awaitable[Answer | Failure]]) -> Answer | Failure:
        pause_s, reason = self.limits.first_pause_s, ""
        for number in range(1, self.limits.max_attempts + 1):
            outcome = await attempt()
            if not isinstance(outcome, Failure):
                return outcome
            if outcome.bad_query:
                return outcome
            if not outcome.passing:
                return Failure(reason=f"failed with {outcome.reason}")
            reason = outcome.reason
            if number < self.limits.max_attempts:
                # Jitter keeps many workers that were refused together from coming back together.
                await asyncio.sleep(max(pause_s * random.uniform(1, 1.5), outcome.wait_s))
                pause_s *= 2
                await self._pace.turn()
        return Failure(reason=f"failed {self.limits.max_attempts} times, at last with {reason}")


USER_AGENT = "agentflow-ray/0.1"
_PASSING = (408, 425, 429)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonReply:
    """A server's answer below status 500 that is no redirect. `value` is None where a refusal holds no JSON."""

    status: int
    value: Any


async def request_json(
    method: str,
    url: str,
    limits: ServiceLimits,
    *,
    params: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    body: Any = None,
    secret: str = "",
) -> JsonReply | Failure:
    """Send once. What the answer quotes of `secret` reads `[key]`; no failure holds a word of the answer.

    Pass a key in `headers`: addresses stand in the logs of HTTP clients and servers.
    """
    try:
        async with (
            asyncio.timeout(limits.attempt_limit_s),
            httpx.AsyncClient(timeout=None, verify=tls_context(), headers={"User-Agent": USER_AGENT}) as client,
            client.stream(method, url, params=params, headers=headers, json=body) as response,
        ):
            content = await _read(response, limits.max_bytes)
    except TimeoutError:
        return Failure(reason=f"no answer within {limits.attempt_limit_s} s", passing=True)
    except httpx.TransportError as error:
        return Failure(reason=type(error).__name__, passing=True)
    except httpx.HTTPError as error:
        return Failure(reason=type(error).__name__)
    if content is None:
        return Failure(reason=f"an answer of more than {limits.max_bytes} bytes")
    return _judged(response, content.replace(secret.encode(), b"[key]") if secret else content)


def _judged(response: httpx.Response, content: bytes) -> JsonReply | Failure:
    status = response.status_code
    if status in _PASSING or status >= 500:
        return Failure(reason=f"status {status}", passing=True, wait_s=retry_after_s(response))
    if status >= 400:
        return JsonReply(status=status, value=_json(content))
    value = _json(content) if status == 200 else None
    return Failure(reason=f"status {status} without JSON") if value is None else JsonReply(status=200, value=value)


async def _read(response: httpx.Response, max_bytes: int) -> bytes | None:
    """The body; None when it is longer than `max_bytes`."""
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > max_bytes:
            return None
    return bytes(content)


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


@cache
def tls_context() -> ssl.SSLContext:
    """What HTTPS trusts; made once: reading the certificates takes longer than many a request."""
    return httpx.create_ssl_context()


def retry_after_s(response: httpx.Response) -> float:
    """The pause that the server asks for, as seconds or as a date; 0 when it asks for none."""
    asked = response.headers.get("Retry-After", "")
    try:
        return max(0.0, float(asked))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(asked) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
