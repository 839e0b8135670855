"""Actions inside the process: thinking, giving the answer, running Python in the sandbox."""

import asyncio
from functools import partial

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

    def __init__(self, sandbox: Sandbox, *, timeout_s: float = 5.0) -> None:
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
