"""Serve a recipe's tools over the Model Context Protocol, for any agent that speaks it."""

import asyncio
import signal
import sys
from types import FrameType

from configs.run import RunConfig
from envs.mcp_server import Transport, serve
from envs.tools.toolbox import Toolbox


def run_serve_tools(config: RunConfig, *, transport: Transport, host: str, port: int) -> None:
    """Returns when the client hangs up (stdio) or at SIGTERM (http), with every session and sandbox ended."""
    if transport == "http":
        # The HTTP server, once it has ended, raises the signal again, whose default would skip the toolbox's end.
        signal.signal(signal.SIGTERM, _end)
    with Toolbox(config.envs) as toolbox:
        if toolbox.sandbox and toolbox.sandbox.without:
            print(f"agentflow: code sandbox: {toolbox.sandbox}", file=sys.stderr)
        asyncio.run(serve(toolbox, transport=transport, host=host, port=port))


def _end(signal_number: int, frame: FrameType | None) -> None:
    sys.exit(0)
