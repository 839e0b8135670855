"""Any server with OpenAI's chat completions as an engine: vLLM, llama.cpp, SGLang, or a provider."""

from collections.abc import Mapping
from typing import Any

from configs.backend import BackendConfig
from rollout.chat_http import ChatServer, chat_messages, count_of
from rollout.engine import BackendError, EngineError, GenerationRequest
from rollout.thinking import parse_reply
from rollout.types import TextCompletion


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
