"""Engines behind an address: servers of Ollama and of the OpenAI protocol, asked over HTTP."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from configs.api_keys import ApiKeyError, find_key, how_to_set
from configs.backend import BackendConfig
from rollout.engines.engine import BackendError, ContextFullError, EngineError, GenerationRequest
from rollout.thinking import parse_reply
from rollout.types import Message, TextCompletion

MAX_REPLY_BYTES = 4 * 2**20
MAX_QUOTED_CHARS = 200
FIRST_PAUSE_S = 0.5

_PASSING = (408, 425, 429, 500, 502, 503, 504)
_CONTEXT_FULL = re.compile(r"context[ _](length|size|window)|exceeds? the available context", re.IGNORECASE)
_CONTROL = re.compile(r"<(?=\||/?(?:s|think|start_of_turn|end_of_turn)>)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """An attempt without a reply. `status` is None where no response came."""

    problem: str
    status: int | None = None
    passing: bool = False
    unreachable: bool = False


class ChatServer:
    """One server. Every request has a connection of its own, so that it serves any event loop."""

    def __init__(self, config: BackendConfig, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self.url = config.url
        self._config = config
        self._first_pause_s = first_pause_s
        self._key = _key(config.api_key_env)
        self._tls = httpx.create_ssl_context()

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that the server answers with.

        Raises BackendError when it is not there or refuses what every request needs, ContextFullError when the
        messages are too long for the model, EngineError for anything else, retries included.
        """
        pause_s, retries_left = self._first_pause_s, self._config.max_retries
        while True:
            outcome = await self._attempt(method, path, body)
            if isinstance(outcome, dict):
                return outcome
            if not (outcome.passing and retries_left):
                raise self._error(outcome)
            retries_left -= 1
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def upload(self, path: str, file: Path) -> None:
        """A file of any size, as it stands, unless the server has what is at `path` already. Raises BackendError."""
        try:
            # The limit is httpx's own here, for each read and write: how long a whole file takes, nobody knows.
            async with httpx.AsyncClient(
                timeout=self._config.request_timeout_s, verify=self._tls, headers=self._headers()
            ) as http:
                if (await http.head(f"{self.url}{path}")).status_code == 200:
                    return
                response = await http.post(f"{self.url}{path}", content=_parts(file))
            problem = "" if response.is_success else f"status {response.status_code} ({_words(response.content)})"
        except httpx.RequestError as error:
            problem = f"the connection broke ({type(error).__name__})"
        if problem:
            raise BackendError(f"{self.url}: {file.name} was not taken: {problem}; check that the server runs")

    def _headers(self) -> dict[str, str] | None:
        return {"Authorization": f"Bearer {self._key}"} if self._key else None

    async def _attempt(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any] | _Failure:
        limit_s = self._config.request_timeout_s
        try:
            async with (
                asyncio.timeout(limit_s),
                # No limit of httpx's own: it bounds each read, and a server that trickles would never meet it.
                httpx.AsyncClient(timeout=None, verify=self._tls, headers=self._headers()) as http,
                http.stream(method, f"{self.url}{path}", json=body) as response,
            ):
                return _read(response.status_code, await _content(response))
        except TimeoutError:
            return _Failure(problem=f"no reply within {limit_s:g} s; raise backend.request_timeout_s", passing=True)
        except httpx.ConnectError:
            return _Failure(problem="no connection", passing=True, unreachable=True)
        except httpx.RequestError as error:
            return _Failure(problem=f"the connection broke ({type(error).__name__})", passing=True)

    def _error(self, failure: _Failure) -> RuntimeError:
        """What to raise. Not in an `except`: the HTTP client's error holds the request, and that the key."""
        problem = failure.problem.replace(self._key, "[key]") if self._key else failure.problem
        said = f"{self.url}: {problem}"
        if failure.unreachable:
            return BackendError(f"{said}; start the server, or set backend.base_url to where it listens")
        if failure.status in (401, 403):
            return BackendError(f"{said}; set a valid key in the variable that backend.api_key_env names")
        if failure.status == 404:
            return BackendError(f"{said}; check backend.model ('{self._config.model}') and backend.base_url")
        if failure.status in (400, 413, 500) and _CONTEXT_FULL.search(problem):
            return ContextFullError(said)
        if failure.status in (400, 413, 422):
            return BackendError(f"{said}; the server does not take this request: check backend.kind and backend.form")
        logging.getLogger(__name__).warning("%s", said)
        return EngineError(said)


def chat_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """As a server takes them. It reads control tokens wherever they stand, so what only looks like one (`<|im_end|>`
    in a tool result) is written with a space: no text can forge a role. Raises EngineError when there are none."""
    if not messages:
        raise EngineError("this module asks with token ids, and a server takes messages only")
    return [{"role": message.role, "content": _CONTROL.sub("< ", message.content)} for message in messages]


def count_of(reply: Mapping[str, Any], name: str) -> int:
    """A token count of a reply; 0 where the server tells none."""
    value = reply.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


async def _parts(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as stream:
        while part := stream.read(2**20):
            yield part


async def _content(response: httpx.Response) -> bytes:
    content = b""
    async for part in response.aiter_bytes():
        content += part
        if len(content) > MAX_REPLY_BYTES:
            break
    return content


def _read(status: int, content: bytes) -> dict[str, Any] | _Failure:
    if len(content) > MAX_REPLY_BYTES:
        return _Failure(problem=f"status {status} with more than {MAX_REPLY_BYTES} bytes", status=status)
    if status != 200:
        return _Failure(problem=f"status {status} ({_words(content)})", status=status, passing=_passes(status, content))
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        return _Failure(problem="status 200 without a JSON object", status=status, passing=True)
    return reply


def _passes(status: int, content: bytes) -> bool:
    return status in _PASSING and not _CONTEXT_FULL.search(_words(content))


def _words(content: bytes) -> str:
    """The server's own, from `{"error": "..."}` or `{"error": {"message": "..."}}` or as they stand."""
    text = content.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    return " ".join(text.split())[:MAX_QUOTED_CHARS] or "no words"


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    try:
        key = find_key(variable)
    except ApiKeyError as error:
        raise BackendError(f"backend.api_key_env: {error}") from None
    if key is None:
        raise BackendError(f"backend.api_key_env needs {variable}: {how_to_set(variable)}, or leave it out")
    return key


PLAIN_SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
"""Ollama's own defaults cut and bend the distribution; the policy was trained, and is compared, without."""


class OllamaEngine:
    """An `Engine` for one model of one server. `num_ctx` is the context length in tokens."""

    def __init__(self, server: ChatServer, config: BackendConfig, *, num_ctx: int, seed: int) -> None:
        self._server = server
        self._config = config
        self._num_ctx = num_ctx
        self._seed = seed

    async def create(self, gguf: Path, digest: str, template: str, parameters: Mapping[str, Any]) -> None:
        """Make the model out of a GGUF file whose sha256 is `digest`. One of the same name is replaced. Raises
        BackendError."""
        blob = f"sha256:{digest}"
        await self._server.upload(f"/api/blobs/{blob}", gguf)
        body = {
            "model": self._config.model,
            "files": {gguf.name: blob},
            "template": template,
            "parameters": dict(parameters),
            "stream": False,
        }
        reply = await self._server.request("POST", "/api/create", body)
        if reply.get("status") != "success":
            raise BackendError(f"{self._server.url}: the model was not made: {reply.get('status')!r}; update Ollama")

    async def check(self) -> None:
        """Whether the server has the model. Raises BackendError."""
        await self._server.request("POST", "/api/show", {"model": self._config.model})

    async def generate(self, request: GenerationRequest) -> TextCompletion:
        """Raises BackendError when the model thinks although it was told not to: its answers would not be the
        planner's."""
        if not request.use_adapter:
            raise BackendError("a served model has no frozen base to ask: set rollout.verifier/generator.kind=rule")
        reply = await self._server.request("POST", "/api/chat", self._body(request))
        text = self._text(reply)
        return TextCompletion(
            text=text,
            finish_reason=_finish_reason(reply, request.max_tokens),
            num_prompt_tokens=count_of(reply, "prompt_eval_count"),
            num_tokens=count_of(reply, "eval_count"),
        )

    def release(self, trajectory_id: str) -> None:
        """A request ends with the connection that its caller drops."""

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        body = {
            "model": self._config.model,
            "messages": chat_messages(request.messages),
            "stream": False,
            "think": False,
            "keep_alive": self._config.keep_alive,
            # Ollama would drop the oldest messages, or what was written first, without a word.
            "truncate": False,
            "shift": False,
            "options": {
                "num_predict": request.max_tokens,
                "num_ctx": self._num_ctx,
                "temperature": request.temperature,
                "seed": self._seed if request.seed is None else request.seed,
                **PLAIN_SAMPLING,
            },
        }
        return body | ({"format": dict(request.json_schema)} if request.json_schema is not None else {})

    def _text(self, reply: Mapping[str, Any]) -> str:
        message = reply.get("message")
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise EngineError(f"{self._server.url}: the reply of /api/chat holds no message")
        parsed = parse_reply(message["content"])
        if message.get("thinking") or parsed.thinking is not None:
            raise BackendError(
                f"{self._server.url}: '{self._config.model}' thinks although `think` is false; serve it with the "
                "template of its export (`agentflow serve`), or update Ollama"
            )
        return parsed.answer


def _finish_reason(reply: Mapping[str, Any], max_tokens: int) -> Literal["stop", "length"]:
    reason = reply.get("done_reason")
    if reply.get("done") is not True or reason not in ("stop", "length"):
        raise EngineError(f"the reply of /api/chat was not finished (done_reason {reason!r})")
    if reason == "length" and count_of(reply, "eval_count") < max_tokens:
        raise ContextFullError("the reply was cut by the context length")
    return reason


class OpenAiEngine:
    """An `Engine` for one model of one server. Thinking that comes with the text is taken off."""

    def __init__(self, server: ChatServer, config: BackendConfig, *, seed: int) -> None:
        self._server = server
        self._config = config
        self._seed = seed

    async def check(self) -> None:
        """Whether the server lists the model. Raises BackendError."""
        reply = await self._server.request("GET", "/models")
        rows = reply.get("data")
        names = [row["id"] for row in rows if isinstance(row, dict) and "id" in row] if isinstance(rows, list) else []
        if self._config.model not in names:
            raise BackendError(
                f"{self._server.url} serves no '{self._config.model}' but {', '.join(map(str, names[:8])) or 'nothing'}"
                "; set backend.model"
            )

    async def generate(self, request: GenerationRequest) -> TextCompletion:
        if not request.use_adapter:
            raise BackendError("a served model has no frozen base to ask: set rollout.verifier/generator.kind=rule")
        reply = await self._server.request("POST", "/chat/completions", self._body(request))
        try:
            choice = reply["choices"][0]
            reason, text = choice["finish_reason"], choice["message"]["content"]
        except (LookupError, TypeError):
            raise EngineError(f"{self._server.url}: the reply holds no chat completion") from None
        if reason not in ("stop", "length"):
            raise EngineError(f"{self._server.url}: the reply was not finished (finish_reason {reason!r})")
        usage = reply.get("usage")
        counts: Mapping[str, Any] = usage if isinstance(usage, dict) else {}
        return TextCompletion(
            text=parse_reply(text).answer if isinstance(text, str) else "",
            finish_reason=reason,
            num_prompt_tokens=count_of(counts, "prompt_tokens"),
            num_tokens=count_of(counts, "completion_tokens"),
        )

    def release(self, trajectory_id: str) -> None:
        """A request ends with the connection that its caller drops."""

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        body = {
            "model": self._config.model,
            "messages": chat_messages(request.messages),
            "temperature": request.temperature,
            "max_tokens": request.max_tokens,
            "seed": self._seed if request.seed is None else request.seed,
            "stream": False,
        }
        return body | self._form(request)

    def _form(self, request: GenerationRequest) -> dict[str, Any]:
        if self._config.form == "vllm_grammar":
            grammar = {"structured_outputs": {"grammar": request.grammar}} if request.grammar else {}
            return grammar | {"chat_template_kwargs": {"enable_thinking": False}}
        if request.json_schema is None:
            return {}
        schema = {"name": "decision", "strict": True, "schema": dict(request.json_schema)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
