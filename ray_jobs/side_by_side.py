"""Asynchronous work on several items at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


async def side_by_side(items: Iterable[Item], work: Callable[[Item], Awaitable[None]], *, limit: int) -> None:
    """Work on at most `limit` items at a time.

    After an error no item is started, the open ones finish, and the first error is raised.
    """
    remaining, failures = iter(items), list[Exception]()

    async def run() -> None:
        for item in remaining:
            if failures:
                return
            try:
                await work(item)
            except Exception as error:
                failures.append(error)

    await asyncio.gather(*(run() for _ in range(limit)))
    if failures:
        raise failures[0]
