import asyncio
import time

from rollout.store import turns
from rollout.store.turns import AT_ONCE, Turns


async def in_line(line, num, went_on):
    """So many calls that are woken together."""

    async def go_on(number):
        await line.turn()
        went_on.append(number)

    calls = [asyncio.create_task(go_on(number)) for number in range(num)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return calls


async def test_a_few_go_on_at_once_and_the_others_in_the_order_of_their_calls():
    went_on = []
    calls = await in_line(Turns(), 5 * AT_ONCE, went_on)
    assert went_on == list(range(AT_ONCE))
    await asyncio.gather(*calls)
    assert went_on == list(range(5 * AT_ONCE))


async def test_who_comes_later_waits_for_no_more_than_a_few_of_them():
    went_on, line = [], Turns()
    calls = await in_line(line, 10 * AT_ONCE, went_on)
    while len(went_on) < 10 * AT_ONCE:
        before = len(went_on)
        await asyncio.sleep(0)
        assert len(went_on) - before <= AT_ONCE
    await asyncio.gather(*calls)


async def test_calls_one_after_the_other_never_wait_for_good():
    line = Turns()
    for _ in range(3 * AT_ONCE):
        async with asyncio.timeout(5):
            await line.turn()


async def test_loop_that_is_always_late_holds_nobody_up_for_good(monkeypatch):
    monkeypatch.setattr(turns, "REST_S", 0.0001)

    async def keep_busy():
        while True:
            time.sleep(0.002)  # noqa: ASYNC251
            await asyncio.sleep(0)

    went_on, busy = [], asyncio.create_task(keep_busy())
    async with asyncio.timeout(30):
        await asyncio.gather(*await in_line(Turns(), 4 * AT_ONCE, went_on))
    busy.cancel()
    assert len(went_on) == 4 * AT_ONCE


async def test_next_ones_wait_for_a_loop_that_is_late():
    went_on, line = [], Turns()
    calls = await in_line(line, 2 * AT_ONCE, went_on)
    line._go_on(due=asyncio.get_running_loop().time() - 1, num_late=0)
    assert [call.done() for call in calls].count(True) == AT_ONCE
    await asyncio.gather(*calls)


async def test_who_gave_up_takes_nobodys_turn():
    went_on, line = [], Turns()
    calls = await in_line(line, 3 * AT_ONCE, went_on)
    for call in calls[AT_ONCE : 2 * AT_ONCE]:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert went_on == [*range(AT_ONCE), *range(2 * AT_ONCE, 3 * AT_ONCE)]
