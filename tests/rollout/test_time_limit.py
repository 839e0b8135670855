"""The clock of an attempt, in virtual time: it stands still while the engine works."""

import asyncio

import pytest

from rollout.time_limit import TimeLimit
from tests.virtual_time import run_in_virtual_time


def seconds_of(work, limit_s=10.0):
    """When the block ended, and whether its time was over."""

    async def timed():
        loop, limit = asyncio.get_running_loop(), TimeLimit(limit_s)
        started = loop.time()
        try:
            async with limit:
                await work(limit)
        except TimeoutError:
            return loop.time() - started, True
        return loop.time() - started, False

    return run_in_virtual_time(timed())


async def of_the_engine(limit, seconds):
    with limit.paused():
        await asyncio.sleep(seconds)


def test_time_of_the_engine_does_not_count():
    async def work(limit):
        await asyncio.sleep(4)
        await of_the_engine(limit, 1000)
        await asyncio.sleep(5)

    assert seconds_of(work) == (pytest.approx(1009), False)


def test_after_a_pause_there_is_as_much_time_left_as_before():
    async def work(limit):
        await asyncio.sleep(4)
        await of_the_engine(limit, 1000)
        await asyncio.sleep(100)

    assert seconds_of(work) == (pytest.approx(1010), True)
