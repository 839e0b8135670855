"""Asking a frozen language model: the run's own untrained base, or one behind an OpenAI-compatible address."""

from collections.abc import Awaitable, Callable

from configs.envs import BaseGeneratorConfig
from envs.http import RefusedError, ServiceLimits, ToolService, chat_advice, chat_completion
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
    """The model that the configuration names, asked greedily; `own_model` is the run's. Raises ToolSetupError."""
    if config.base_url is not None:
        key = ""
        if variable := config.api_key_env:
            key = read_key("base_generator", variable, "or leave envs.base_generator.api_key_env out")
        service = ToolService(config.base_url, limits, key=key, name="base_generator")
        return lambda prompt: service.ask(lambda: _attempt(service, config, prompt))
    if own_model is None:
        raise ToolSetupError(
            "base_generator needs a model: set envs.base_generator.base_url and .model to an OpenAI-compatible "
            "server, for here is no engine of a run to ask"
        )
    return own_model


async def _attempt(service: ToolService, config: BaseGeneratorConfig, prompt: str) -> str:
    body = {
        "model": config.model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": config.max_tokens,
    }
    try:
        return chat_completion(await service.send("POST", "/chat/completions", body=body)).text
    except RefusedError as error:
        advice = chat_advice(error, "envs.base_generator", "check envs.base_generator")
        raise RefusedError(f"{error}; {advice}") from None
