"""Actions that need no page: thinking, giving the answer, running Python in the sandbox, and asking a frozen language
model, the run's own untrained base or one behind an OpenAI-compatible address."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from configs.envs import BaseGeneratorConfig
from configs.errors import UserError, read_key
from envs.http import RefusedError, ServiceLimits, ToolService, chat_advice, chat_completion
from envs.sandbox import Sandbox
from envs.types import ToolResult, ToolUnavailableError


class ThinkTool:
    name = "think"
    description = "note a thought"

    async def call(self, arguments: str) -> ToolResult:
        return ToolResult(text="Noted.")


class AnswerTool:
    name = "answer"
    description = "give the final answer"

    async def call(self, arguments: str) -> ToolResult:
        return ToolResult(text=arguments)


class PythonCodeTool:
    """Later calls see the names of earlier ones. `close` ends the interpreter, also during a call."""

    name = "code"
    description = "run Python (math, sympy, numpy); names persist, the last expression is shown"

    def __init__(self, sandbox: Sandbox, *, timeout_s: float) -> None:
        self._executor = sandbox.executor
        self._episode = sandbox.episode()
        self._timeout_s = timeout_s

    async def call(self, arguments: str) -> ToolResult:
        run = partial(self._episode.run, arguments, timeout_s=self._timeout_s)
        try:
            result = asyncio.get_running_loop().run_in_executor(self._executor, run)
        except RuntimeError as error:  # what a pool of threads raises after its end
            raise ToolUnavailableError("the sandbox is closed") from error
        return await result

    def close(self) -> None:
        self._episode.close()


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
    """The model that the configuration names, asked greedily; `own_model` is the run's. Raises UserError."""
    if config.base_url is not None:
        key = ""
        if variable := config.api_key_env:
            key = read_key("base_generator", variable, "or leave envs.base_generator.api_key_env out")
        service = ToolService(config.base_url, limits, key=key, name="base_generator")
        return lambda prompt: service.ask(lambda: _attempt(service, config, prompt))
    if own_model is None:
        raise UserError(
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
