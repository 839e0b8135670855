"""The clock of an attempt, in virtual time: it stands still while the engine works."""

import asyncio

import pytest

from rollout.engines.engine import TimeLimit
from tests.virtual_time import run_in_virtual_time


def seconds_of(work, limit_s=10.0, wall_s=None):
    """When the block ended, and whether its time was over."""

    async def timed():
        loop, limit = asyncio.get_running_loop(), TimeLimit(limit_s, wall_s)
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


@pytest.mark.parametrize(
    ("limit_s", "wall_s", "ends_at", "is_over"),
    [(10, 500, 500, True), (None, 500, 500, True), (10, 1002, 1002, True), (10, 5000, 1005, False), (3, 2, 2, True)],
)
def test_the_wall_time_ends_an_attempt_also_while_the_engine_works(limit_s, wall_s, ends_at, is_over):
    async def work(limit):
        await asyncio.sleep(2.5)
        with limit.paused():
            await asyncio.sleep(400)
            with limit.paused():
                await asyncio.sleep(597.5)
        await asyncio.sleep(5)

    assert seconds_of(work, limit_s, wall_s) == (pytest.approx(ends_at), is_over)
