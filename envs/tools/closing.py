"""Connections of tools that end in the background, so that no attempt waits for them."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import TypeVar

T = TypeVar("T")
_closing: set[asyncio.Task[None]] = set()
"""The tasks that close connections; an event loop holds its tasks only weakly."""


def close_later(closing: Coroutine[None, None, None]) -> None:
    task = asyncio.get_running_loop().create_task(closing)
    _closing.add(task)
    task.add_done_callback(_closing.discard)


async def until_closed(work: Awaitable[T]) -> T:
    """Return the result of an event loop's last work, once all connections that it closed have ended.

    A loop that ends cancels its tasks. If this hits a connection to an MCP server's process while it closes, one of its
    tasks waits for the end of the server's output, and the server for the end of its input, without a limit.
    """
    try:
        return await work
    finally:
        await asyncio.gather(*_closing)
