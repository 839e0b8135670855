"""Tool server whose sandbox has no import check, only the walls of the kernel."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from envs.mcp_server import serve
from envs.sandbox import Sandbox, SandboxSettings
from envs.tools.toolbox import PythonCodeTool
from envs.types import Tool


class BareToolbox:
    """`code` with the given time limit, and `hanging_code` with a short one."""

    def __init__(self, timeout_s: float, hang_timeout_s: float) -> None:
        self._limits = {"code": timeout_s, "hanging_code": hang_timeout_s}
        self._sandbox = Sandbox(SandboxSettings(tier="namespaces", check_imports=False, memory_mb=512))

    @contextmanager
    def episode(self) -> Iterator[list[Tool]]:
        tools = []
        for name, limit in self._limits.items():
            tool = PythonCodeTool(self._sandbox, timeout_s=limit)
            tool.name = name
            tools.append(tool)
        try:
            yield list(tools)
        finally:
            for tool in tools:
                tool.close()


if __name__ == "__main__":
    asyncio.run(serve(BareToolbox(*map(float, sys.argv[1:])), transport="http"))
