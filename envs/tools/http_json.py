"""One JSON request over HTTP, with a time limit and a cap on what is read."""

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

import httpx

from envs.tools.service import Failure, ServiceLimits

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
