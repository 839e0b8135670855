import asyncio

import pytest

from rollout.time_limit import side_by_side


async def test_open_work_is_bounded():
    num_open, most_open, done = 0, 0, []

    async def work(number):
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        await asyncio.sleep(0.001)
        num_open -= 1
        done.append(number)

    await side_by_side(range(40), work, limit=7)
    assert (most_open, sorted(done)) == (7, list(range(40)))


async def test_after_an_error_open_work_is_finished_and_none_is_started():
    finished = []

    async def work(number):
        await asyncio.sleep(0 if number == 3 else 0.01)
        if number == 3:
            raise PermissionError("the key was refused")
        if number == 5:
            raise KeyError("late")
        finished.append(number)

    with pytest.raises(PermissionError):
        await side_by_side(range(200), work, limit=8)
    assert finished == [0, 1, 2, 4, 6, 7]
