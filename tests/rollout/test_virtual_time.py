import asyncio

import pytest

from ray_jobs.simulate.simulation import NothingWillHappenError, run_in_virtual_time


def now():
    return asyncio.get_running_loop().time()


async def arrivals(*delays):
    """(delay, time) of sleepers that start together, in the order in which they wake."""
    woken = []

    async def sleep(delay):
        await asyncio.sleep(delay)
        woken.append((delay, now()))

    await asyncio.gather(*map(sleep, delays))
    return woken


def test_sleepers_wake_in_order_at_their_time_without_waiting():
    woken = run_in_virtual_time(arrivals(86_400, 0.5, 0, 3600, 0.25))
    assert [delay for delay, _ in woken] == [0, 0.25, 0.5, 3600, 86_400]
    assert [at for _, at in woken] == pytest.approx([0, 0.25, 0.5, 3600, 86_400])


def test_time_stands_still_while_code_runs():
    async def work():
        for _ in range(1000):
            await asyncio.sleep(0)
        return now()

    assert run_in_virtual_time(work()) == 0


def test_a_very_late_timer_is_reached():
    assert run_in_virtual_time(arrivals(1e9, 1e9 + 1))[-1][1] == pytest.approx(1e9 + 1)


def test_a_timeout_expires_in_virtual_time():
    async def wait():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return now()

    assert run_in_virtual_time(wait()) == pytest.approx(30)


def test_a_condition_wakes_its_waiter_at_the_time_of_the_change():
    async def play():
        changed, seen = asyncio.Condition(), []

        async def wait():
            async with changed:
                await changed.wait()
                seen.append(now())

        waiter = asyncio.create_task(wait())
        await asyncio.sleep(7)
        async with changed:
            changed.notify_all()
        await waiter
        return seen

    assert run_in_virtual_time(play()) == pytest.approx([7])


def test_what_would_hang_is_an_error():
    async def hang():
        await asyncio.sleep(3)
        await asyncio.Event().wait()

    with pytest.raises(NothingWillHappenError, match=r"at 3\.000 s"):
        run_in_virtual_time(hang())


def test_an_error_of_the_code_comes_out():
    async def fail():
        await asyncio.sleep(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_in_virtual_time(fail())
