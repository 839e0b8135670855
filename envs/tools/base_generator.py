"""Asking a frozen language model: the run's own untrained base, or one behind an OpenAI-compatible address."""

from collections.abc import Awaitable, Callable

from configs.envs import BaseGeneratorConfig
from envs.http import Failure, JsonReply, Service, ServiceLimits, request_json
from envs.tools.keys import ToolSetupError, read_key
from envs.types import ToolResult

MAX_PROMPT_CHARS = 8000

AskModel = Callable[[str], Awaitable[str]]
"""A prompt to the model's answer. Raises ToolUnavailableError, or its own engine's error, when the model is gone."""


class BaseGeneratorTool:
    name = "base_generator"
    description = "ask a language model that has no tools; state everything it needs to know"

    def __init__(self, ask: AskModel) -> None:
        self._ask = ask

    async def call(self, arguments: str) -> ToolResult:
        prompt = arguments.strip()[:MAX_PROMPT_CHARS]
        if not prompt:
            return ToolResult(text="The model needs a question.", error="empty_query")
        return ToolResult(text=(await self._ask(prompt)).strip() or "The model gave no answer.")


def build_ask(config: BaseGeneratorConfig, limits: ServiceLimits, own_model: AskModel | None) -> AskModel:
    """The model that the configuration names; `own_model` is the run's. Raises ToolSetupError."""
    if config.base_url is not None:
        return OpenAiModel(config, limits).ask
    if own_model is None:
        raise ToolSetupError(
            "base_generator needs a model: set envs.base_generator.base_url and .model to an OpenAI-compatible "
            "server, for here is no engine of a run to ask"
        )
    return own_model


class OpenAiModel:
    """A model behind the chat-completions protocol, asked greedily."""

    def __init__(self, config: BaseGeneratorConfig, limits: ServiceLimits) -> None:
        self._config = config
        self._service = Service("base_generator", limits)
        self._key = ""
        if variable := config.api_key_env:
            self._key = read_key("base_generator", variable, "or leave envs.base_generator.api_key_env out")

    async def ask(self, prompt: str) -> str:
        return await self._service.ask(lambda: self._attempt(prompt))

    async def _attempt(self, prompt: str) -> str | Failure:
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self._config.max_tokens,
        }
        reply = await request_json(
            "POST",
            f"{self._config.base_url}/chat/completions",
            self._service.limits,
            headers={"Authorization": f"Bearer {self._key}"} if self._key else None,
            body=body,
            secret=self._key,
        )
        return reply if isinstance(reply, Failure) else _text(reply)


def _text(reply: JsonReply) -> str | Failure:
    if reply.status != 200:
        return Failure(reason=f"status {reply.status}; check envs.base_generator")
    try:
        return str(reply.value["choices"][0]["message"]["content"] or "")
    except (LookupError, TypeError):
        return Failure(reason="status 200 without a chat completion")
