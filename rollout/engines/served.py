"""Engines behind an address: servers of Ollama and of the OpenAI protocol, asked over HTTP."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.api_keys import ApiKeyError
from configs.backend import OllamaConfig, OpenAiConfig, ServedConfig
from envs.http import (
    HttpError,
    RefusedError,
    Sleep,
    UnreachableError,
    UnreadableError,
    chat_advice,
    chat_completion,
    chat_service,
    token_count,
)
from rollout.engines.engine import BackendError, ContextFullError, EngineError, GenerationRequest
from rollout.types import Message, TextCompletion

_CONTEXT_FULL = re.compile(r"context[ _](length|size|window)|exceeds? the available context", re.IGNORECASE)
_OPENING = re.compile(r"\s*<think>")
_CLOSING = "</think>"
_CONTROL = re.compile(r"<(?=[|｜]|/?(?:s|think|start_of_turn|end_of_turn)>)")


class ChatServer:
    """One server of chat messages. Any event loop may ask it."""

    def __init__(self, config: ServedConfig, *, sleep: Sleep = asyncio.sleep) -> None:
        self.url = config.base_url
        try:
            self._service = chat_service(config.base_url, config, section="backend", sleep=sleep)
        except ApiKeyError as error:
            raise BackendError(str(error)) from None

    async def request(self, method: str, path: str, body: Mapping[str, object] | None = None) -> dict[str, object]:
        """The JSON object that the server answers with.

        Raises BackendError when it is not there or refuses what every request needs, ContextFullError when the
        messages are too long for the model, EngineError for anything else, retries included.
        """
        try:
            return await self._service.ask(lambda: self._attempt(method, path, body))
        except HttpError as error:
            advice = chat_advice(error, "backend", "check backend.type and backend.form: the request is not taken")
            said = f"{self._said(error)}; {advice}"
            if isinstance(error, UnreachableError | RefusedError):
                raise BackendError(said) from None
            logging.getLogger(__name__).warning("%s", said)
            raise EngineError(said) from None

    async def upload(self, path: str, file: Path) -> None:
        """A file of any size, as it stands, unless the server has what is at `path` already. Raises BackendError."""
        try:
            if not await self._has(path):
                await self._service.send("POST", path, content=_parts(file))
        except HttpError as error:
            raise BackendError(
                f"{self._said(error, f'{file.name} was not taken: ')}; check that the server runs"
            ) from None

    async def _has(self, path: str) -> bool:
        try:
            await self._service.send("HEAD", path)
        except RefusedError:
            return False
        return True

    async def _attempt(self, method: str, path: str, body: Mapping[str, object] | None) -> dict[str, object]:
        try:
            reply = await self._service.send(method, path, body=body)
        except HttpError as error:
            if error.status in (400, 413, 500) and _CONTEXT_FULL.search(error.words):
                raise ContextFullError(self._said(error)) from None
            raise
        if not isinstance(reply, dict):
            raise UnreadableError("status 200 without a JSON object", status=200)
        return reply

    def _said(self, error: HttpError, what: str = "") -> str:
        return f"{self.url}: {what}{error}" + (f" ({error.words})" if error.words else "")


def chat_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """As a server takes them. It reads control tokens wherever they stand, so what only looks like one (`<|im_end|>`
    or `<｜User｜>` in a tool result) is written with a space: no text can forge a role. Raises EngineError when there
    are none."""
    if not messages:
        raise EngineError("this module asks with token ids, and a server takes messages only")
    return [{"role": message.role, "content": _CONTROL.sub("< ", message.content)} for message in messages]


async def _parts(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as stream:
        while part := stream.read(2**20):
            yield part


class _ServedEngine:
    """An `Engine` for one model of one server; `_further` and `_read` are the protocol's."""

    _path: str

    def __init__(self, server: ChatServer, config: ServedConfig, *, seed: int) -> None:
        self._server = server
        self._config = config
        self._seed = seed

    async def generate(self, request: GenerationRequest) -> TextCompletion:
        """As `ChatServer.request`. Raises BackendError, too, for a request that no server can answer."""
        if not request.use_adapter:
            raise BackendError("a served model has no frozen base to ask: set agent.verifier/generator.type=rule")
        body = {"model": self._config.model, "messages": chat_messages(request.messages), "stream": False}
        seed = self._seed if request.seed is None else request.seed
        return self._read(await self._server.request("POST", self._path, body | self._further(request, seed)), request)

    def release(self, trajectory_id: str) -> None:
        """A request ends with the connection that its caller drops."""

    def _further(self, request: GenerationRequest, seed: int) -> dict[str, object]:
        raise NotImplementedError

    def _read(self, reply: Mapping[str, object], request: GenerationRequest) -> TextCompletion:
        raise NotImplementedError


KEEP_ALIVE = "5m"
"""How long Ollama keeps the model loaded after a request."""
PLAIN_SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
"""Ollama's own defaults cut and bend the distribution; the policy was trained, and is compared, without."""
VLLM_PLAIN_SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""vLLM's server has its defaults from the model's generation_config.json."""


class OllamaEngine(_ServedEngine):
    """Over Ollama's native API. `num_ctx` is the context length in tokens. A model that thinks although it was told not
    to is refused with a BackendError: its answers would not be the planner's."""

    _path = "/api/chat"

    def __init__(self, server: ChatServer, config: OllamaConfig, *, num_ctx: int, seed: int) -> None:
        super().__init__(server, config, seed=seed)
        self._num_ctx = num_ctx

    async def create(self, gguf: Path, digest: str, template: str, parameters: Mapping[str, object]) -> None:
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

    def _further(self, request: GenerationRequest, seed: int) -> dict[str, object]:
        fields = {
            "think": False,
            "keep_alive": KEEP_ALIVE,
            # Ollama would drop the oldest messages, or what was written first, without a word.
            "truncate": False,
            "shift": False,
            "options": {
                "num_predict": request.max_tokens,
                "num_ctx": self._num_ctx,
                "temperature": request.temperature,
                "seed": seed,
                **PLAIN_SAMPLING,
            },
        }
        return fields | ({"format": dict(request.json_schema)} if request.json_schema is not None else {})

    def _read(self, reply: Mapping[str, object], request: GenerationRequest) -> TextCompletion:
        return TextCompletion(
            text=self._text(reply.get("message")),
            finish_reason=_finish_reason(reply, request.max_tokens),
            num_prompt_tokens=token_count(reply, "prompt_eval_count") or 0,
            num_tokens=token_count(reply, "eval_count") or 0,
        )

    def _text(self, message: object) -> str:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise EngineError(f"{self._server.url}: the reply of /api/chat holds no message")
        parsed = parse_reply(message["content"])
        if message.get("thinking") or parsed.thinking is not None:
            raise BackendError(
                f"{self._server.url}: '{self._config.model}' thinks although `think` is false; serve it with the "
                "template of its export (`agentflow serve`), or update Ollama"
            )
        return parsed.answer


def _finish_reason(reply: Mapping[str, object], max_tokens: int) -> Literal["stop", "length"]:
    reason = reply.get("done_reason")
    if reply.get("done") is not True or reason not in ("stop", "length"):
        raise EngineError(f"the reply of /api/chat was not finished (done_reason {reason!r})")
    if reason == "length" and (token_count(reply, "eval_count") or 0) < max_tokens:
        raise ContextFullError("the reply was cut by the context length")
    return reason


class OpenAiEngine(_ServedEngine):
    """Over chat completions. Thinking that comes with the text is taken off."""

    _path = "/chat/completions"

    def __init__(self, server: ChatServer, config: OpenAiConfig, *, seed: int) -> None:
        super().__init__(server, config, seed=seed)
        self._form = config.form

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

    def _further(self, request: GenerationRequest, seed: int) -> dict[str, object]:
        fields: dict[str, object] = {"temperature": request.temperature, "max_tokens": request.max_tokens, "seed": seed}
        if self._form == "vllm_grammar":
            grammar = {"structured_outputs": {"grammar": request.grammar}} if request.grammar else {}
            return fields | VLLM_PLAIN_SAMPLING | grammar | {"chat_template_kwargs": {"enable_thinking": False}}
        if request.json_schema is None:
            return fields
        schema = {"name": "decision", "strict": True, "schema": dict(request.json_schema)}
        return fields | {"response_format": {"type": "json_schema", "json_schema": schema}}

    def _read(self, reply: Mapping[str, object], request: GenerationRequest) -> TextCompletion:
        try:
            completion = chat_completion(reply)
        except UnreadableError as error:
            raise EngineError(f"{self._server.url}: {error}") from None
        reason = completion.finish_reason
        if reason != "stop" and reason != "length":
            raise EngineError(f"{self._server.url}: the reply was not finished (finish_reason {reason!r})")
        return TextCompletion(
            text=parse_reply(completion.text).answer,
            finish_reason=reason,
            num_prompt_tokens=completion.input_tokens or 0,
            num_tokens=completion.output_tokens or 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """A reply and the thinking block of Qwen3 before it. `thinking` is None where there was none, and the empty string
    for the empty block that Qwen3's template writes when thinking is off. `answer` is empty where the thinking never
    ended."""

    thinking: str | None
    answer: str


def parse_reply(text: str) -> ParsedReply:
    """Takes a reply apart. Only a block that opens the reply is thinking: a tag that a later JSON string quotes is
    text. The opening tag may be missing (the template wrote it into the prompt), the closing one too (the reply was
    cut)."""
    opening = _OPENING.match(text)
    body = text[opening.end() :] if opening else text
    inside, closing, answer = body.partition(_CLOSING)
    if closing and (opening or not inside.lstrip().startswith("{")):
        return ParsedReply(thinking=inside.strip(), answer=answer.lstrip())
    if opening:
        return ParsedReply(thinking=body.strip(), answer="")
    return ParsedReply(thinking=None, answer=text)
