"""The clock of an attempt, in virtual time: it stands still while the engine works."""

import asyncio

import pytest

from rollout.engines.engine import TimeLimit
from tests.virtual_time import run_in_virtual_time


def seconds_of(work, limit_s=10.0):
    """When the block ended, and whether its time was over."""

    async def timed():
        loop, limit = asyncio.get_running_loop(), TimeLimit(limit_s)
        started = loop.time()
        try:
            async with limit.running():
                await work(limit)
        except TimeoutError:
            return loop.time() - started, True
        return loop.time() - started, False

    return run_in_virtual_time(timed())


@pytest.mark.parametrize(("after_s", "ends_at", "is_over"), [(5, 1009, False), (100, 1010, True)])
def test_time_of_the_engine_does_not_count_and_as_much_is_left_as_before(after_s, ends_at, is_over):
    async def work(limit):
        await asyncio.sleep(4)
        with limit.paused():
            await asyncio.sleep(1000)
        await asyncio.sleep(after_s)

    assert seconds_of(work) == (pytest.approx(ends_at), is_over)
