"""The HTTP client of tools, judge and served engines: a pace, retries, limits of time and size, no key in an error."""

import asyncio
import json
import random
import ssl
import time
import zlib
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, TypeVar

import httpx

from configs.api_keys import ApiKeyError, find_key, how_to_set, on_this_machine
from configs.backend import ServedConfig
from configs.errors import each_text
from configs.reward import JudgeConfig
from envs.types import ToolUnavailableError

Answer = TypeVar("Answer")
Sleep = Callable[[float], Awaitable[object]]

USER_AGENT = "agentflow-ray/0.1"
LONGEST_PAUSE_S = 120.0
MAX_QUOTED_CHARS = 200
_PASSING = (408, 425, 429)
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
_GZIP = b"\x1f\x8b"
"""Every member begins so."""


class HttpError(Exception):
    """A request without a usable reply.

    The message holds no word of the server's; `words` does, on one line and without the key. `status` is None where no
    reply came. `wait_s` is the pause that the server asks for, `attempts` counts the requests.
    """

    attempts = 1

    def __init__(self, problem: str, *, status: int | None = None, words: str = "", wait_s: float = 0.0) -> None:
        super().__init__(problem)
        self.status = status
        self.words = words
        self.wait_s = wait_s


class PassingError(HttpError):
    """The same request may succeed later."""


class UnreachableError(PassingError):
    """Nobody listens at the address: the request was not sent."""


class SlowError(PassingError):
    """No whole reply came within the time limit of an attempt."""


class BrokenOffError(PassingError):
    """A compressed reply ended before its end."""


class RefusedError(HttpError):
    """The server does not take the request, now or later."""


class UnreadableError(HttpError):
    """The reply is too long or is not what was asked for."""


class QueryRefusedError(Exception):
    """The service takes this query for a wrong one: the caller's doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """The bounds of one question to a service.

    `time_limit_s` covers all attempts and the pauses between them, but not the wait for the first start.
    `requests_per_minute` and `max_concurrency` hold for all questions of one object, `max_bytes` for one reply before
    and after decompression. `retry_unreadable`: a reply that cannot be read is asked for again.
    """

    max_attempts: int = 4
    attempt_limit_s: float = 10.0
    time_limit_s: float | None = 30.0
    first_pause_s: float = 0.5
    requests_per_minute: float = 60.0
    max_concurrency: int | None = None
    max_bytes: int = 4 * 2**20
    retry_unreadable: bool = False


class Attempts:
    """Attempts that start at an even pace and are repeated after a failure that may pass.

    Event loops can share one that has no `max_concurrency`.
    """

    def __init__(self, limits: ServiceLimits, *, sleep: Sleep = asyncio.sleep) -> None:
        self.limits = limits
        self._sleep = sleep
        self._slots = asyncio.Semaphore(limits.max_concurrency) if limits.max_concurrency else nullcontext()
        self._retried = (PassingError, UnreadableError) if limits.retry_unreadable else (PassingError,)
        self._next_start = 0.0

    async def ask(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return what the first successful attempt gives. Raises the HttpError of the last attempt, and whatever else
        an attempt raises."""
        try:
            async with asyncio.timeout(None) as limit:
                return await self._repeat(attempt, limit)
        except TimeoutError:
            raise PassingError(f"no answer within {self.limits.time_limit_s} s") from None

    async def _repeat(self, attempt: Callable[[], Awaitable[Answer]], limit: asyncio.Timeout) -> Answer:
        loop, number, pause_s = asyncio.get_running_loop(), 1, self.limits.first_pause_s
        while True:
            async with self._slots:
                await self._turn()
                if number == 1 and self.limits.time_limit_s is not None:
                    limit.reschedule(loop.time() + self.limits.time_limit_s)
                try:
                    return await attempt()
                except HttpError as error:
                    failure = error
            failure.attempts = number
            # Jitter keeps many workers that were refused together from coming back together.
            wait_s = max(pause_s * random.uniform(1, 1.5), failure.wait_s)
            again = isinstance(failure, self._retried) and number < self.limits.max_attempts
            left_s = LONGEST_PAUSE_S if (ends := limit.when()) is None else ends - loop.time()
            if not again or wait_s > min(LONGEST_PAUSE_S, left_s):
                raise failure
            await self._sleep(wait_s)
            number, pause_s = number + 1, min(2 * pause_s, LONGEST_PAUSE_S / 2)

    async def _turn(self) -> None:
        """Wait for this caller's start in an even row of starts."""
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 60 / self.limits.requests_per_minute
        if start > now:
            await self._sleep(start - now)


class Service(Attempts):
    """One server. Each request has a connection of its own.

    The header `key_header` carries `key`. Wherever the server repeats the key, it reads `[key]`.
    """

    def __init__(
        self,
        base_url: str,
        limits: ServiceLimits,
        *,
        key: str = "",
        key_header: str = "Authorization",
        name: str = "",
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        super().__init__(limits, sleep=sleep)
        self._base_url = base_url
        self._name = name
        self._key = key
        self._headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "gzip"}
        if key:
            self._headers[key_header] = f"Bearer {key}" if key_header == "Authorization" else key

    async def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        content: AsyncIterable[bytes] | None = None,
    ) -> Any:
        """Send one request and return the JSON value of the reply, None for an empty one. Raises HttpError.

        `content` is sent as it is; then the time limit holds for each part, not for the whole.
        """
        limit_s = self.limits.attempt_limit_s
        failure: HttpError
        try:
            async with (
                # The client's own limit is for each read, and a server that trickles never meets it.
                asyncio.timeout(None if content else limit_s),
                self._client(limit_s) as client,
                client.stream(method, self._base_url + path, params=params, json=body, content=content) as response,
            ):
                coding = response.headers.get("Content-Encoding", "")
                reply, cut = await read_body(response.aiter_raw(), coding, self.limits.max_bytes)
        except (TimeoutError, httpx.TimeoutException):
            failure = SlowError(f"no reply within {limit_s:g} s")
        except httpx.ConnectError:
            failure = UnreachableError("no connection")
        except httpx.RequestError as error:
            failure = PassingError(f"the connection broke ({type(error).__name__})")
        except UnreadableError as error:
            failure = UnreadableError(f"a reply that cannot be read: {error}", status=response.status_code)
        else:
            if cut:
                problem = f"status {response.status_code} with more than {self.limits.max_bytes} bytes"
                raise UnreadableError(problem, status=response.status_code)
            return _value(response, reply, self._without_key)
        # Not raised in an `except`: the HTTP client's error holds the request, and that the key.
        raise failure

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text

    def _client(self, limit_s: float) -> httpx.AsyncClient:
        """A proxy of the environment knows nothing of what listens on this machine."""
        proxied = not on_this_machine(self._base_url)
        return httpx.AsyncClient(timeout=limit_s, verify=tls_context(), headers=self._headers, trust_env=proxied)


class ToolService(Service):
    """A service that a tool asks: its failure is a fault of the tool and not of the caller. Errors show its `name`."""

    async def ask(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """As `Attempts.ask`. Raises ToolUnavailableError instead of HttpError."""
        try:
            return await super().ask(attempt)
        except HttpError as error:
            times = f" {error.attempts} times, at last" if error.attempts > 1 else ""
            raise ToolUnavailableError(f"{self._name} failed{times} with {error}") from None


class _Unpacker:
    """Unpacks gzip of one member or several, and deflate: with zlib's header or, as some servers send it, bare."""

    def __init__(self, coding: str) -> None:
        self._may_be_bare = coding == "deflate"
        self._first = b""
        self._stream = zlib.decompressobj(_GZIP_OR_ZLIB)

    def unpack(self, chunk: bytes, at_most: int) -> bytes:
        """Raises zlib.error. What follows the last member and is none is left out, such as zeros."""
        part = self._begin(chunk, at_most) if self._may_be_bare else self._stream.decompress(chunk, at_most)
        while self._stream.unused_data.startswith(_GZIP) and len(part) < at_most:
            rest, self._stream = self._stream.unused_data, zlib.decompressobj(_GZIP_OR_ZLIB)
            part += self._stream.decompress(rest, at_most - len(part))
        return part

    @property
    def at_end(self) -> bool:
        """Whether the last member is whole."""
        return self._stream.eof

    def _begin(self, chunk: bytes, at_most: int) -> bytes:
        """The first two bytes tell whether there is a header."""
        self._first += chunk
        self._may_be_bare = len(self._first) < 2
        try:
            return self._stream.decompress(chunk, at_most)
        except zlib.error:
            self._stream = zlib.decompressobj(-zlib.MAX_WBITS)
            return self._stream.decompress(self._first, at_most)


async def read_body(chunks: AsyncIterable[bytes], coding: str, max_bytes: int) -> tuple[bytes, bool]:
    """Return the decompressed body, and whether it was cut at `max_bytes`. Never more than that is held, however much
    the server sends or its compressed bytes would become. Raises UnreadableError and BrokenOffError."""
    if coding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise UnreadableError("it is compressed in a way that is not supported")
    unpacker = _Unpacker(coding) if coding not in ("", "identity") else None
    body = bytearray()
    num_read = 0
    async for chunk in chunks:
        num_read += len(chunk)
        try:
            body += unpacker.unpack(chunk, max_bytes + 1 - len(body)) if unpacker else chunk
        except zlib.error:
            raise UnreadableError("its compression is broken") from None
        # What is read counts too: a compressed stream can go on for ever and become nothing.
        if max(len(body), num_read) > max_bytes:
            return bytes(body[:max_bytes]), True
    if unpacker and num_read and not unpacker.at_end:
        raise BrokenOffError("the connection broke in the midst of a compressed reply")
    return bytes(body), False


def is_passing(status: int) -> bool:
    """Whether the same request may get another status later."""
    return status in _PASSING or status >= 500


def retry_after_s(asked: str) -> float:
    """The pause that a Retry-After header asks for, in seconds or as a date; 0 when it asks for none."""
    try:
        return max(0.0, float(asked))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(asked) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return 0.0


@cache
def tls_context() -> ssl.SSLContext:
    """What HTTPS trusts; made once: reading the certificates takes longer than many a request."""
    return httpx.create_ssl_context()


def _value(response: httpx.Response, content: bytes, redact: Callable[[str], str]) -> Any:
    status = response.status_code
    if not response.is_success:
        kind = PassingError if is_passing(status) else RefusedError
        wait_s = retry_after_s(response.headers.get("Retry-After", ""))
        raise kind(f"status {status}", status=status, words=_words(content, redact), wait_s=wait_s)
    try:
        return _json(content, redact) if content else None
    except (ValueError, RecursionError):
        raise UnreadableError(f"status {status} without JSON", status=status) from None


def _json(content: bytes, redact: Callable[[str], str]) -> Any:
    """Its texts redacted as they are read: JSON can spell a letter in several ways. Raises ValueError and
    RecursionError."""
    return each_text(json.loads(content), redact)


def _words(content: bytes, redact: Callable[[str], str]) -> str:
    """The server's own, from `{"error": "..."}` or `{"error": {"message": "..."}}` or as they stand."""
    try:
        value = _json(content, redact)
        error = value.get("error", value) if isinstance(value, dict) else value
        said = error.get("message", error) if isinstance(error, dict) else error
        text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = redact(content.decode(errors="replace"))
    return " ".join(text.split())[:MAX_QUOTED_CHARS]


# Chat completions: the protocol that the judge, served engines and the tool `base_generator` share.


def chat_service(
    base_url: str, config: JudgeConfig | ServedConfig, *, section: str, sleep: Sleep, **limits: Any
) -> Service:
    """The server that the table `section` of a recipe configures, asked as often as it takes. Raises ApiKeyError."""
    key = ""
    if variable := config.api_key_env:
        try:
            key = find_key(variable) or ""
        except ApiKeyError as error:
            raise ApiKeyError(f"{section}.api_key_env: {error}") from None
        if not key:
            raise ApiKeyError(f"{section}.api_key_env needs {variable}: {how_to_set(variable)}, or leave it out")
    chosen = ServiceLimits(
        max_attempts=config.max_retries + 1,
        attempt_limit_s=config.request_timeout_s,
        **({"time_limit_s": None, "requests_per_minute": float("inf"), "retry_unreadable": True} | limits),
    )
    return Service(base_url, chosen, key=key, sleep=sleep)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletion:
    """A reply of `/chat/completions`. `text` is empty where the model wrote none; counts are None where none came."""

    text: str
    finish_reason: object
    input_tokens: int | None
    output_tokens: int | None


def chat_completion(reply: Any) -> ChatCompletion:
    """Read the JSON value of a reply. Raises UnreadableError."""
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"]
    except (LookupError, TypeError):
        raise UnreadableError("status 200 without a chat completion", status=200) from None
    usage = reply.get("usage")
    return ChatCompletion(
        text=text if isinstance(text, str) else "",
        finish_reason=choice.get("finish_reason"),
        input_tokens=token_count(usage, "prompt_tokens"),
        output_tokens=token_count(usage, "completion_tokens"),
    )


def token_count(counts: object, name: str) -> int | None:
    """A count of a reply; None where the server gives no usable one."""
    value = counts.get(name) if isinstance(counts, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


_ADVICE = {
    401: "set a valid key in the variable that {section}.api_key_env names",
    402: "top up the account's balance",
    403: "the key has no access: check it, and {section}.model",
    404: "check {section}.base_url and {section}.model",
}


def chat_advice(error: HttpError, section: str, otherwise: str) -> str:
    """What to do about a failed chat completion. `section` is the table of the recipe that configures the server;
    `otherwise` advises about a refusal of this request."""
    if isinstance(error, UnreachableError):
        return f"check {section}.base_url and that the server runs"
    if isinstance(error, SlowError):
        return f"raise {section}.request_timeout_s"
    if isinstance(error, RefusedError):
        return _ADVICE.get(error.status or 0, otherwise).format(section=section)
    return "run again later"
