"""One group that kills its workers is found by running suspects one at a time; the others are trained."""

import asyncio

import pytest

from rollout.buffer import GroupBuffer
from rollout.store.admission import BufferSettings, WorkerStatus
from rollout.store.casualties import Casualties
from rollout.store.ledger import Ledger
from rollout.store.lifecycle import GroupResult

RESULT = GroupResult(ending="all_wrong", payload=b"", versions={0: 1}, facts={})


def make_buffer(**changes):
    values = {"batch_groups": 2, "pipeline_depth": 1, "max_empty_batches": 10**6, "max_tasks": 12} | changes
    return GroupBuffer(BufferSettings(**values), Ledger(), clock=lambda: 0.0)


async def admit(buffer, worker=0, running=(), free_places=4):
    status = WorkerStatus(worker=worker, policy_version=0, running=running, free_places=free_places)
    return list((await buffer.admit(status, patience_s=0)).permits)


async def die(buffer, worker=0):
    return await buffer.release(worker, "its worker was lost")


async def end(buffer, permit):
    await buffer.complete(permit.lease, RESULT)


@pytest.fixture
async def suspicious():
    """A buffer whose first four groups were aboard when a worker died, twice."""
    buffer = make_buffer()
    for attempt in (1, 2):
        assert [permit.lease for permit in await admit(buffer)] == [(ordinal, attempt) for ordinal in range(4)]
        assert (await die(buffer)).fruitless
    return buffer


async def test_one_death_makes_nobody_a_suspect():
    buffer = make_buffer()
    await admit(buffer)
    await die(buffer)
    assert len(await admit(buffer)) == 4


async def test_groups_with_which_a_worker_died_twice_run_one_at_a_time(suspicious):
    for ordinal in range(3):
        (permit,) = await admit(suspicious)
        assert permit.ordinal == ordinal
        assert await admit(suspicious, running=(permit.lease,)) == []
        await end(suspicious, permit)
    (last,) = await admit(suspicious)
    await end(suspicious, last)
    assert [permit.ordinal for permit in await admit(suspicious)] == [4, 5, 6, 7]


async def test_other_workers_go_on_with_other_groups_meanwhile(suspicious):
    (first,) = await admit(suspicious)
    assert await admit(suspicious, worker=1) == []  # all other places are those of suspects
    await end(suspicious, first)
    assert [permit.ordinal for permit in await admit(suspicious, worker=1)] == [4]
    assert [permit.ordinal for permit in await admit(suspicious)] == [1]


async def test_worker_that_runs_other_groups_ends_these_before_it_tries_a_suspect(suspicious):
    (first,) = await admit(suspicious)
    await end(suspicious, first)
    (other,) = await admit(suspicious, worker=1)
    await die(suspicious, worker=0)
    # The lowest index that is left tries them.
    assert await admit(suspicious, worker=1, running=(other.lease,)) == []
    await end(suspicious, other)
    assert [permit.ordinal for permit in await admit(suspicious, worker=1)] == [1]


@pytest.mark.parametrize("comes", ["asks", "proves"])
async def test_worker_that_was_to_try_the_suspects_goes_on_when_another_one_comes_for_them(suspicious, comes):
    buffer = suspicious
    for _ in range(3):
        (suspect,) = await admit(buffer)
        await end(buffer, suspect)
    (other,) = await admit(buffer, worker=1, free_places=1)
    await die(buffer, worker=0)
    status = WorkerStatus(worker=1, policy_version=0, running=(other.lease,), free_places=3)
    waiting = asyncio.create_task(buffer.admit(status))
    await asyncio.sleep(0)
    assert not waiting.done()  # it ends what it runs before it tries the last one
    await (admit(buffer) if comes == "asks" else buffer.prove(0, 0))
    assert [permit.ordinal for permit in (await asyncio.wait_for(waiting, 1)).permits] == [5]


async def test_group_that_kills_its_workers_fails_and_the_others_do_not(suspicious):
    buffer, num_deaths, unexplained = suspicious, 2, 2
    while permits := await admit(buffer):
        if any(permit.task == 0 for permit in permits):
            loss = await die(buffer)
            num_deaths, unexplained = num_deaths + 1, unexplained + (not loss.explained)
        else:
            for permit in permits:
                await end(buffer, permit)
    assert (buffer.counts.all_wrong, buffer.counts.failed, buffer.counts.outstanding) == (11, 1, 0)
    # Two deaths beside the others do not count, six alone do; but for the first of these others ended in between.
    assert (num_deaths, unexplained) == (8, 3)


async def test_innocent_group_keeps_all_its_attempts(suspicious):
    (permit,) = await admit(suspicious)
    unscorable = GroupResult(ending=None, payload=b"", versions={}, facts={}, reason="unscorable")
    for _ in range(5):
        await suspicious.complete(permit.lease, unscorable)
        assert suspicious.counts.failed == 0
        permits = await admit(suspicious)
        while permit.ordinal not in [one.ordinal for one in permits]:
            for one in permits:
                await end(suspicious, one)
            permits = await admit(suspicious)
        (permit,) = [one for one in permits if one.ordinal == permit.ordinal]
    await suspicious.complete(permit.lease, unscorable)
    assert suspicious.counts.failed == 1


async def test_worker_that_always_dies_is_not_explained_by_its_groups():
    buffer = make_buffer(max_attempts=100)
    for _ in range(20):
        assert await admit(buffer)
        loss = await die(buffer)
        assert loss.fruitless
        assert not loss.explained


def test_groups_with_fewer_deaths_go_first():
    casualties = Casualties()
    for groups in ([1, 2, 3], [1, 2, 3], [1]):
        casualties.died(0, groups)
    assert casualties.suspects == {1, 2, 3}
    assert casualties.by_suspicion({1, 2, 3}) == [2, 3, 1]
    casualties.survived(0, 2)
    assert casualties.suspects == {1, 3}
