import asyncio
from types import SimpleNamespace

import pytest

from actors.rollout_worker import Courier


class ScriptedStore:
    """Answers a call when it is told to."""

    def __init__(self):
        self.calls = []
        self.complete = SimpleNamespace(remote=self._complete)

    async def _complete(self, results):
        self.calls.append([lease for lease, _ in results])
        self.answer = asyncio.get_running_loop().create_future()
        await self.answer


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def bringing(courier, *numbers):
    tasks = [asyncio.create_task(courier.bring((number, 0), None)) for number in numbers]
    await settle()
    return tasks


async def test_what_comes_back_while_a_call_is_on_its_way_goes_with_the_next():
    store = ScriptedStore()
    courier = Courier(store)
    (first,) = await bringing(courier, 0)
    others = await bringing(courier, 1, 2)
    assert store.calls == [[(0, 0)]]
    store.answer.set_result(None)
    await settle()
    assert first.done()
    assert not any(one.done() for one in others)
    assert store.calls[1:] == [[(1, 0), (2, 0)]]
    store.answer.set_result(None)
    await asyncio.gather(*others)
    (last,) = await bringing(courier, 3)
    store.answer.set_result(None)
    await last


async def test_what_a_call_raises_is_told_to_whoever_it_was_for_and_to_nobody_else():
    store = ScriptedStore()
    courier = Courier(store)
    (first,) = await bringing(courier, 0)
    (second,) = await bringing(courier, 1)
    store.answer.set_exception(OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        await first
    await settle()
    store.answer.set_result(None)
    await second


async def test_whoever_was_cancelled_keeps_nobody_from_an_answer():
    store = ScriptedStore()
    courier = Courier(store)
    first, second = await bringing(courier, 0, 1)
    first.cancel()
    store.answer.set_result(None)
    await second
    assert store.calls == [[(0, 0), (1, 0)]]
