"""Actions without web access: think, answer, run Python in the sandbox, and ask a frozen language model."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from configs.api_keys import required_key
from configs.envs import BASE_GENERATOR_TOKENS
from configs.errors import UserError
from configs.rollout import ServerConfig
from envs.sandbox import Sandbox
from envs.tools.http import Service, ServiceLimits
from envs.types import ToolResult, ToolUnavailableError

MAX_PROMPT_CHARS = 8000

AskModel = Callable[[str], Awaitable[str]]
"""From a prompt to the model's answer; raises ToolUnavailableError or an error of the engine."""


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
    """A Python interpreter in the sandbox. Later calls see the names of earlier ones."""

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
        except RuntimeError as error:  # raised by a thread pool after its shutdown
            raise ToolUnavailableError("the sandbox is closed") from error
        return await result

    def close(self) -> None:
        """End the interpreter, also during a call."""
        self._episode.close()


class BaseGeneratorTool:
    """A language model without tools: the run's own untrained base, or one behind an OpenAI-compatible address."""

    name = "base_generator"
    description = "ask a language model that has no tools; state everything it needs to know"

    def __init__(self, ask: AskModel) -> None:
        self._ask = ask

    async def call(self, arguments: str) -> ToolResult:
        prompt = arguments.strip()[:MAX_PROMPT_CHARS]
        if not prompt:
            return ToolResult(text="The model needs a question.", error="empty_query")
        return ToolResult(text=(await self._ask(prompt)).strip() or "The model gave no answer.")


def build_ask(config: ServerConfig | None, limits: ServiceLimits, own_model: AskModel | None) -> AskModel:
    """Return a function that asks the configured server, else the run's `own_model`, greedily; raises UserError."""
    if config is None:
        if own_model is None:
            raise UserError(
                "base_generator needs a model: set envs.base_generator.base_url and .model to an OpenAI-compatible "
                "server, because this command has no engine of a run"
            )
        return own_model
    key = ""
    if variable := config.api_key_env:
        key = required_key("base_generator", variable, "or leave envs.base_generator.api_key_env out")
    service = Service("base_generator", config.base_url, limits, key=key, advice="check envs.base_generator")

    async def attempt(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": config.model, "messages": messages, "temperature": 0, "max_tokens": BASE_GENERATOR_TOKENS}
        reply = await service.send("POST", "/chat/completions", body=body)
        return str(reply["choices"][0]["message"]["content"] or "")

    return lambda prompt: service.ask(lambda: attempt(prompt))
