"""Ollama's native API as an engine: `/api/chat` under the planner's schema, with thinking switched off."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from configs.backend import BackendConfig
from rollout.chat_http import ChatServer, chat_messages, count_of
from rollout.engine import BackendError, ContextFullError, EngineError, GenerationRequest
from rollout.thinking import parse_reply
from rollout.types import TextCompletion

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
