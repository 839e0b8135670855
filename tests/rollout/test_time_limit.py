"""The clock of an attempt, in virtual time: it stands still while the engine works."""

import asyncio
import math
import re

import pytest

from rollout.engines.engine import TimeLimit, TimeLimitError
from tests.virtual_time import run_in_virtual_time


def seconds_of(work, limit_s=10.0, wall_s=math.inf):
    """Return when the block ended, and the setting of the time that was over."""

    async def timed():
        loop, limit = asyncio.get_running_loop(), TimeLimit(limit_s, wall_s)
        started = loop.time()
        try:
            async with limit.running():
                await work(limit)
        except TimeLimitError as error:
            return loop.time() - started, re.search(r"rollout\.(\w+)_timeout_s", str(error))[1]
        return loop.time() - started, None

    return run_in_virtual_time(timed())


@pytest.mark.parametrize(("after_s", "ends_at", "over"), [(5, 1009, None), (100, 1010, "episode")])
def test_time_of_the_engine_does_not_count_and_as_much_is_left_as_before(after_s, ends_at, over):
    async def work(limit):
        await asyncio.sleep(4)
        with limit.paused():
            await asyncio.sleep(1000)
        await asyncio.sleep(after_s)

    assert seconds_of(work) == (pytest.approx(ends_at), over)


@pytest.mark.parametrize(
    ("limit_s", "wall_s", "ends_at", "over"),
    [
        *((10, 500, 500, "wall"), (math.inf, 500, 500, "wall"), (10, 1002, 1002, "wall"), (3, 2, 2, "wall")),
        *((10, 5000, 1005, None), (2, 9, 2, "episode")),
    ],
)
def test_the_wall_time_ends_an_attempt_also_while_the_engine_works(limit_s, wall_s, ends_at, over):
    async def work(limit):
        await asyncio.sleep(2.5)
        with limit.paused():
            await asyncio.sleep(400)
            with limit.paused():
                await asyncio.sleep(597.5)
        await asyncio.sleep(5)

    assert seconds_of(work, limit_s, wall_s) == (pytest.approx(ends_at), over)
