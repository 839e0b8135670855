import asyncio
import contextlib
import json
import random
import shutil
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollout.buffer import (
    Admission,
    BufferClosedError,
    BufferSettings,
    GroupBuffer,
    StarvedError,
    WorkerStatus,
    admission_capacity,
)
from rollout.store.choice import LearnableChoice
from rollout.store.ledger import Ledger
from rollout.store.ledger_file import LedgerError
from rollout.store.lifecycle import NOTHING_TRAINED, GroupCounts, GroupResult

MIXED, RIGHT, WRONG, UNSCORABLE = "ready", "all_right", "all_wrong", None


aside = Ledger.aside


@pytest.fixture(autouse=True)
def _nothing_is_read_in_a_thread(monkeypatch):
    """So that who need not wait goes on at once."""

    async def at_once(ledger, look):
        return look()

    monkeypatch.setattr(Ledger, "aside", at_once)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "first").mkdir()
    return tmp_path / "first" / "ledger.db"


def make_buffer(ledger=None, *, policy_version=0, clock=lambda: 0.0, choice=None, **changes):
    values = {"batch_groups": 2, "pipeline_depth": 1, "max_empty_batches": 3} | changes
    return GroupBuffer(
        BufferSettings(**values),
        Ledger() if ledger is None else ledger,
        policy_version=policy_version,
        clock=clock,
        choice=choice,
    )


def make_result(ending=MIXED, *, payload=b"bytes", **changes):
    values = {"ending": ending, "payload": payload, "versions": {0: 10}, "facts": {"groups": 1}}
    return GroupResult(**(values | changes))


def trained_until(ledger, step):
    """What a checkpoint after `step` knows."""
    known = ledger.trained_groups()
    return replace(known, steps=tuple(one for one in known.steps if one.step <= step))


def make_status(*, worker=0, policy_version=0, running=(), free_places=10):
    return WorkerStatus(worker=worker, policy_version=policy_version, running=running, free_places=free_places)


def leases_of(ledger, worker):
    return tuple(permit.lease for one, permit in ledger.leases() if one == worker)


async def admitted(buffer, **status):
    """What a worker is given that waits for nothing. It says that it runs what the ledger believes it to run."""
    status.setdefault("running", leases_of(buffer._ledger, status.get("worker", 0)))
    return list((await buffer.admit(make_status(**status), patience_s=0)).permits)


async def complete(buffer, permit, ending=MIXED, **changes):
    return await buffer.complete(permit.lease, make_result(ending, payload=b"%d" % permit.ordinal, **changes))


async def batch_now(buffer, step):
    """The batch that there is without waiting. Raises TimeoutError where there is none."""
    async with asyncio.timeout(0):
        return await buffer.next_batch(step)


async def waiting(awaitable):
    """A task of it that cannot go on yet."""
    task = asyncio.create_task(awaitable)
    await still_waiting(task)
    return task


async def still_waiting(task):
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done(), task.result()


async def woken(task):
    """What a task returns that can go on now."""
    async with asyncio.timeout(1):
        return await task


async def train(buffer, step, *, policy_version=None):
    await batch_now(buffer, step)
    await buffer.mark_trained(step, step if policy_version is None else policy_version)


def ordinals(permits):
    return [permit.ordinal for permit in permits]


def killed(path):
    """The ledger's files as they were in the moment of a kill -9, in a folder beside theirs."""
    copy = Path(tempfile.mkdtemp(dir=path.parents[1])) / path.name
    for file in path.parent.glob(path.name + "*"):
        if not file.name.endswith("-shm"):
            shutil.copy(file, copy.parent)
    return copy


# Admission.


def test_capacity_is_depth_plus_one_batches_less_what_is_outstanding():
    assert admission_capacity(pipeline_depth=0, batch_groups=4, outstanding=0) == 4
    assert admission_capacity(pipeline_depth=2, batch_groups=4, outstanding=5) == 7
    assert admission_capacity(pipeline_depth=1, batch_groups=4, outstanding=9) == 0


async def test_worker_is_given_no_more_than_its_free_places():
    buffer = make_buffer()
    assert ordinals(await admitted(buffer, free_places=3)) == [0, 1, 2]
    assert await admitted(buffer, worker=1, free_places=0) == []
    assert ordinals(await admitted(buffer, worker=1)) == [3]


async def test_places_are_shared_among_the_workers_that_ask():
    buffer = make_buffer(batch_groups=3)
    await buffer.prove(1, 0)
    assert ordinals(await admitted(buffer)) == [0, 1, 2]
    assert await admitted(buffer) == []
    await buffer.prove(2, 0)
    assert ordinals(await admitted(buffer, worker=1)) == [3, 4]
    assert ordinals(await admitted(buffer, worker=2)) == [5]


async def test_share_of_a_lost_worker_goes_to_the_others():
    buffer = make_buffer()
    await buffer.prove(1, 0)
    assert ordinals(await admitted(buffer)) == [0, 1]
    await buffer.release(1, "lost")
    assert ordinals(await admitted(buffer)) == [2, 3]


async def test_more_workers_than_places_run_one_group_each():
    buffer = make_buffer(batch_groups=1)
    for worker in range(5):
        await buffer.prove(worker, 0)
    assert [len(await admitted(buffer, worker=worker)) for worker in range(5)] == [1, 1, 0, 0, 0]


async def test_workers_share_a_synchronous_round():
    buffer = make_buffer(pipeline_depth=0)
    await buffer.prove(1, 0)
    (first,) = await admitted(buffer)
    (second,) = await admitted(buffer, worker=1)
    await complete(buffer, first, WRONG)
    assert await admitted(buffer) == []
    await complete(buffer, second)
    assert ordinals(await admitted(buffer)) == [2]


async def test_filtered_group_gives_its_place_back_at_once():
    buffer = make_buffer()
    permits = await admitted(buffer)
    assert len(permits) == 4
    waiter = await waiting(buffer.admit(make_status(worker=1)))
    assert not await complete(buffer, permits[0], RIGHT)
    assert ordinals((await woken(waiter)).permits) == [4]
    assert buffer.counts == GroupCounts(drawn=5, running=4, all_right=1)


async def test_batch_in_training_counts_as_outstanding_until_it_is_marked_trained():
    buffer = make_buffer()
    permits = await admitted(buffer)
    for permit in permits[:2]:
        assert await complete(buffer, permit)
    assert (await batch_now(buffer, 1)).payloads == (b"0", b"1")
    waiter = await waiting(buffer.admit(make_status(worker=1)))
    await buffer.mark_trained(1, 1)
    assert ordinals((await woken(waiter)).permits) == [4, 5]
    assert buffer.counts == GroupCounts(drawn=6, trained=2, running=4)


async def test_waiting_for_admission_ends_with_the_workers_patience():
    buffer = make_buffer()
    await admitted(buffer)
    assert await buffer.admit(make_status(worker=1), patience_s=0.01) == Admission()


async def test_depth_zero_admits_nothing_before_the_batch_is_trained_and_asks_for_its_version():
    buffer = make_buffer(pipeline_depth=0)
    for permit in await admitted(buffer):
        await complete(buffer, permit)
    assert await admitted(buffer) == []
    await batch_now(buffer, 1)
    old = await waiting(buffer.admit(make_status(worker=1, policy_version=6)))
    waiter = await waiting(buffer.admit(make_status(policy_version=7)))
    await buffer.mark_trained(1, 7)
    assert (await woken(waiter)).permits
    await still_waiting(old)


async def test_depth_zero_refills_in_rounds_so_that_batches_do_not_depend_on_who_is_first():
    buffer = make_buffer(pipeline_depth=0)
    permits = await admitted(buffer)
    await complete(buffer, permits[0], WRONG)
    waiter = await waiting(buffer.admit(make_status(worker=1)))
    await complete(buffer, permits[1])
    assert ordinals((await woken(waiter)).permits) == [2]
    with pytest.raises(TimeoutError):
        await batch_now(buffer, 1)


async def test_depth_allows_that_many_versions_of_lag():
    buffer = make_buffer(pipeline_depth=2)
    for permit in await admitted(buffer, free_places=2):
        await complete(buffer, permit)
    await train(buffer, 1, policy_version=5)
    assert await admitted(buffer, policy_version=2) == []
    assert await admitted(buffer, policy_version=3)


async def test_worker_whose_proven_version_is_too_old_gets_no_work():
    buffer = make_buffer(policy_version=5)
    waiter = await waiting(buffer.admit(make_status(policy_version=3)))
    await buffer.prove(1, 5)
    await still_waiting(waiter)
    await buffer.prove(0, 4)
    assert len((await woken(waiter)).permits) == 2


async def test_successor_of_a_lost_worker_must_prove_its_weights_anew():
    buffer = make_buffer(batch_groups=1, policy_version=2)
    assert ordinals(await admitted(buffer, policy_version=2)) == [0, 1]
    await buffer.release(0, "lost")
    assert await admitted(buffer, policy_version=0) == []
    await buffer.prove(0, 1)
    assert ordinals(await admitted(buffer, policy_version=0)) == [0, 1]


async def test_status_that_was_overtaken_by_a_proof_takes_nothing_back():
    buffer = make_buffer(batch_groups=1, policy_version=5)
    await buffer.prove(0, 5)
    assert ordinals(await admitted(buffer, policy_version=3)) == [0, 1]


# Waiting for admission.


async def waiting_workers(buffer, *workers, free_places=1):
    return [
        await waiting(buffer.admit(make_status(worker=worker, free_places=free_places, **status)))
        for worker, status in ((one, {"running": leases_of(buffer._ledger, one)}) for one in workers)
    ]


async def served(tasks):
    """Which of them were answered."""
    for _ in range(3):
        await asyncio.sleep(0)
    return [index for index, task in enumerate(tasks) if task.done()]


async def test_as_many_are_woken_as_there_are_places():
    buffer = make_buffer(batch_groups=25)
    permits = await admitted(buffer, free_places=50)
    assert len(permits) == 50
    waiters = await waiting_workers(buffer, *range(1, 31))
    asked = []
    buffer._admitter.room, ask = lambda worker: asked.append(worker) or ask(worker), buffer._admitter.room
    for permit in permits[:2]:
        await complete(buffer, permit, WRONG)
    assert await served(waiters) == [0, 1]
    assert len(asked) < 10
    await complete(buffer, permits[2])
    assert await served(waiters) == [0, 1]
    for waiter in waiters:
        waiter.cancel()


async def test_places_go_to_those_who_run_least_and_of_these_to_who_waits_longest():
    buffer = make_buffer(batch_groups=3)
    for worker in (1, 2, 3):
        await buffer.prove(worker, 0)
    await admitted(buffer, worker=1, free_places=1)
    others = [await admitted(buffer, worker=0, free_places=2), await admitted(buffer, worker=2, free_places=2)]
    await admitted(buffer, worker=3, free_places=1)
    waiters = await waiting_workers(buffer, 0, 1, 3)
    await complete(buffer, others[1][0], WRONG)
    assert await served(waiters) == [1]
    await complete(buffer, others[1][1], WRONG)
    assert await served(waiters) == [1, 2]
    await complete(buffer, others[0][0], WRONG)
    assert await served(waiters) == [0, 1, 2]


async def test_places_that_become_free_together_are_shared_evenly():
    buffer = make_buffer(batch_groups=2)
    for permit in await admitted(buffer):
        await complete(buffer, permit)
    await buffer.release(0, "lost")
    await batch_now(buffer, 1)
    waiters = await waiting_workers(buffer, 1, 2, free_places=4)
    await buffer.mark_trained(1, 1)
    assert [ordinals((await woken(waiter)).permits) for waiter in waiters] == [[4], [5]]


async def test_worker_that_waits_is_given_nothing_beyond_what_it_asked_for():
    buffer = make_buffer(batch_groups=2)
    permits = await admitted(buffer)
    await batch_of(buffer, permits)
    (waiter,) = await waiting_workers(buffer, 0, free_places=1)
    await buffer.mark_trained(1, 1)
    assert ordinals((await woken(waiter)).permits) == [4]


async def test_worker_that_waits_is_given_work_for_places_that_became_free_meanwhile():
    """It asks for one while it runs three; two of these end before there is work."""
    buffer = make_buffer(batch_groups=2)
    permits = await admitted(buffer)
    await complete(buffer, permits[0])
    (waiter,) = await waiting_workers(buffer, 0, free_places=1)
    await complete(buffer, permits[1])
    await complete(buffer, permits[2])
    await batch_now(buffer, 1)
    await buffer.mark_trained(1, 1)
    assert ordinals((await woken(waiter)).permits) == [4, 5]


async def batch_of(buffer, permits):
    for permit in permits:
        await complete(buffer, permit)
    return await batch_now(buffer, 1)


async def test_worker_that_waits_for_its_weights_holds_nobody_up():
    buffer = make_buffer(batch_groups=1, policy_version=5)
    (old,) = await waiting_workers(buffer, 0)
    (fresh,) = [await buffer.admit(make_status(worker=1, policy_version=5, free_places=1))]
    assert ordinals(fresh.permits) == [0]
    await still_waiting(old)
    await buffer.prove(0, 5)
    assert ordinals((await woken(old)).permits) == [1]


async def test_worker_that_waits_gets_the_share_of_one_that_is_lost():
    buffer = make_buffer(batch_groups=1)
    await buffer.prove(1, 0)
    assert ordinals(await admitted(buffer)) == [0]
    (waiter,) = await waiting_workers(buffer, 0)
    await buffer.release(1, "lost")
    assert ordinals((await woken(waiter)).permits) == [1]


async def test_ledger_that_cannot_be_written_is_told_to_those_who_would_have_got_work(monkeypatch):
    buffer = make_buffer(batch_groups=1, pipeline_depth=0)
    (permit,) = await admitted(buffer)
    first, second = await waiting_workers(buffer, 1, 2)

    def full(*_, **__):
        raise LedgerError("cannot write the ledger: disk full")

    with monkeypatch.context() as patched:
        patched.setattr(buffer._ledger, "lease", full)
        assert not await complete(buffer, permit, WRONG)
        with pytest.raises(LedgerError):
            await woken(first)
        await still_waiting(second)
    assert buffer.counts == GroupCounts(drawn=1, all_wrong=1)
    assert ordinals(await admitted(buffer, worker=3)) == []
    assert ordinals((await woken(second)).permits) == [1]


# Results that are written down together.


def transactions(ledger):
    """The list grows with every transaction."""
    seen = []
    ledger._db.set_trace_callback(lambda statement: seen.append(statement) if statement == "COMMIT" else None)
    return seen


async def test_results_that_come_together_are_one_transaction():
    buffer = make_buffer(batch_groups=5)
    permits = await admitted(buffer)
    seen = transactions(buffer._ledger)
    kept = await asyncio.gather(*(complete(buffer, permit) for permit in permits))
    assert kept == [True] * 10
    assert len(seen) == 1


async def test_result_is_answered_once_it_is_written_down():
    buffer = make_buffer()
    permit, *_ = await admitted(buffer)
    seen = transactions(buffer._ledger)
    answer = asyncio.create_task(complete(buffer, permit))
    answer.add_done_callback(lambda _: seen.append("answered"))
    assert await answer
    assert seen == ["COMMIT", "answered"]


async def test_results_that_could_not_be_written_together_may_all_be_brought_again(monkeypatch):
    buffer = make_buffer()
    permits = await admitted(buffer)
    before = buffer.counts
    settle = buffer._ledger.settle

    def full(lease, *arguments, **options):
        if lease == permits[2].lease:
            raise LedgerError("cannot write the ledger: disk full")
        settle(lease, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(buffer._ledger, "settle", full)
        found = await asyncio.gather(*(complete(buffer, permit) for permit in permits), return_exceptions=True)
    assert [type(one) for one in found] == [LedgerError] * 4
    assert buffer._ledger.verify() == before
    assert await asyncio.gather(*(complete(buffer, permit) for permit in permits)) == [True] * 4


async def test_group_that_comes_back_twice_together_counts_once():
    buffer = make_buffer()
    permit, *_ = await admitted(buffer)
    assert await asyncio.gather(complete(buffer, permit), complete(buffer, permit, WRONG)) == [True, False]
    assert buffer.counts == GroupCounts(drawn=4, running=3, ready=1)


async def test_result_that_came_before_its_worker_was_lost_counts():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0)
    (permit,) = await admitted(buffer)
    answer = asyncio.create_task(complete(buffer, permit))
    await asyncio.sleep(0)
    assert (await buffer.release(0, "lost")).num_groups == 0
    assert await answer
    assert buffer.counts == GroupCounts(drawn=1, ready=1)


async def test_result_does_not_make_the_other_ready_groups_be_looked_at(monkeypatch):
    buffer = make_buffer()
    permits = await admitted(buffer)
    with monkeypatch.context() as patched:
        patched.delattr(Ledger, "ready")
        for permit in permits:
            assert await complete(buffer, permit)
    assert buffer.counts.ready == 4


# Answers that were lost.


async def test_admission_asked_for_again_gives_the_same_permits():
    buffer = make_buffer()
    permits = await admitted(buffer, free_places=3)
    assert await admitted(buffer, free_places=3, running=()) == permits
    assert await admitted(buffer, free_places=0, running=(permits[1].lease,)) == [permits[0], permits[2]]
    assert buffer.counts.drawn == 3


async def test_permits_of_a_lost_answer_are_given_out_though_the_policy_moved_on():
    buffer = make_buffer(batch_groups=1)
    permits = await admitted(buffer, free_places=1)
    await buffer.rewind(0, 9, NOTHING_TRAINED)
    assert await admitted(buffer, running=()) == permits


async def test_call_that_waits_beside_a_lost_one_gets_its_permits_when_it_is_asked_again():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0)
    (permit,) = await admitted(buffer, worker=1)
    lost, waiter = await waiting(buffer.admit(make_status())), await waiting(buffer.admit(make_status()))
    await complete(buffer, permit, WRONG)
    permits = list((await woken(lost)).permits)
    assert ordinals(permits) == [1]
    await still_waiting(waiter)
    waiter.cancel()
    assert await admitted(buffer, running=()) == permits


async def test_lost_permit_is_given_out_though_the_worker_does_not_know_yet_what_of_its_own_has_ended():
    buffer = make_buffer()
    (ended,) = await admitted(buffer, free_places=1)
    lost = await admitted(buffer, free_places=1)
    await complete(buffer, ended)
    assert await admitted(buffer, running=(ended.lease,), free_places=0) == lost


async def test_group_that_is_completed_twice_counts_once():
    buffer = make_buffer()
    permit, *_ = await admitted(buffer)
    assert await complete(buffer, permit)
    assert not await complete(buffer, permit, WRONG)
    assert buffer.counts == GroupCounts(drawn=4, running=3, ready=1)


async def test_filtered_group_that_is_completed_twice_starves_nobody():
    buffer = make_buffer(batch_groups=1, max_empty_batches=2)
    permit, *_ = await admitted(buffer)
    for _ in range(5):
        await complete(buffer, permit, WRONG)
    with pytest.raises(TimeoutError):
        await batch_now(buffer, 1)


async def test_batch_asked_for_again_is_the_same():
    buffer = make_buffer()
    for permit in await admitted(buffer):
        await complete(buffer, permit)
    first = await batch_now(buffer, 1)
    assert await batch_now(buffer, 1) == first
    assert first.payloads == (b"0", b"1")
    assert first.facts == {"groups": 4}


async def test_batch_is_the_same_in_a_buffer_that_was_killed(path):
    buffer = make_buffer(Ledger(path))
    for permit in await admitted(buffer):
        await complete(buffer, permit)
    first = await batch_now(buffer, 1)
    assert await batch_now(make_buffer(Ledger(killed(path))), 1) == first


async def test_step_marked_as_trained_twice_is_trained_once():
    buffer = make_buffer()
    for permit in await admitted(buffer):
        await complete(buffer, permit)
    await train(buffer, 1)
    await buffer.mark_trained(1, 1)
    assert buffer.counts == GroupCounts(drawn=4, trained=2, ready=2)
    assert (await batch_now(buffer, 2)).payloads == (b"2", b"3")


async def test_result_of_a_worker_that_was_released_is_ignored():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0)
    (zombie,) = await admitted(buffer)
    assert (await buffer.release(0, "no heartbeat")).num_groups == 1
    assert not await complete(buffer, zombie)
    (again,) = await admitted(buffer, worker=1)
    assert not await complete(buffer, zombie)
    assert buffer.counts == GroupCounts(drawn=1, running=1)
    assert await complete(buffer, again)


async def test_released_groups_go_out_again_before_new_tasks_are_drawn():
    buffer = make_buffer()
    await admitted(buffer, free_places=2)
    assert (await buffer.release(0, "lost")).num_groups == 2
    assert (await buffer.release(0, "lost")).num_groups == 0
    permits = await admitted(buffer, worker=1, free_places=3)
    assert [(permit.ordinal, permit.task, permit.attempt) for permit in permits] == [(0, 0, 2), (1, 1, 2), (2, 2, 1)]


async def test_release_wakes_who_waits_for_work():
    buffer = make_buffer()
    await admitted(buffer)
    waiter = await waiting(buffer.admit(make_status(worker=1, free_places=2)))
    await buffer.release(0, "lost")
    assert [permit.lease for permit in (await woken(waiter)).permits] == [(0, 2), (1, 2)]


async def test_all_workers_are_released_together():
    buffer = make_buffer()
    await admitted(buffer, free_places=1)
    await admitted(buffer, worker=1, free_places=2)
    assert (await buffer.release(None, "the run was cut off")).num_groups == 3
    assert buffer.counts == GroupCounts(drawn=3, queued=3)
    assert buffer.unproven(9) == []


async def test_workers_that_have_not_proven_a_version_are_known():
    buffer = make_buffer()
    await admitted(buffer, policy_version=0, free_places=0)
    await admitted(buffer, worker=1, policy_version=2, free_places=0)
    assert (buffer.unproven(0), buffer.unproven(1), buffer.unproven(3)) == ([], [0], [0, 1])
    await buffer.prove(0, 2)
    assert buffer.unproven(2) == []
    await buffer.release(1, "lost")
    assert buffer.unproven(3) == [0]


async def test_workers_that_are_not_there_have_no_share_of_the_places():
    buffer = make_buffer(pipeline_depth=3)
    for worker in range(4):
        assert len(await admitted(buffer, worker=worker, free_places=0)) == 0
    await buffer.roll_call([3])
    assert len(await admitted(buffer, worker=3)) == 8


async def test_what_a_worker_took_that_was_gone_already_is_given_to_others():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0)
    await buffer.release(0, "lost")
    await admitted(buffer)  # its call was under way when it was lost
    await buffer.roll_call([1])
    assert [permit.lease for permit in await admitted(buffer, worker=1)] == [(0, 2)]


async def test_worker_that_had_ended_no_group_was_fruitless():
    buffer = make_buffer()
    await admitted(buffer, free_places=1)
    assert (await buffer.release(0, "lost")).fruitless
    (permit,) = await admitted(buffer, free_places=1)
    await complete(buffer, permit, UNSCORABLE)
    assert not (await buffer.release(0, "lost")).fruitless
    assert (await buffer.release(0, "lost")).fruitless


async def test_group_that_was_lost_too_often_has_failed_with_the_reason():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0, max_attempts=2)
    for worker in (0, 1):
        (permit,) = await admitted(buffer, worker=worker)
        assert (permit.ordinal, permit.attempt) == (0, worker + 1)
        await buffer.release(worker, f"worker {worker} lost")
    assert buffer.counts == GroupCounts(drawn=1, failed=1)
    assert buffer._ledger.reasons() == {"worker 1 lost": 1}
    assert ordinals(await admitted(buffer, worker=2)) == [1]


# Groups that could not be scored.


async def test_group_with_fewer_than_two_scored_is_tried_again_and_fails_in_the_end():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0, max_attempts=2, max_empty_batches=9)
    for attempt in (1, 2):
        (permit,) = await admitted(buffer)
        assert permit.lease == (0, attempt)
        assert not await complete(buffer, permit, UNSCORABLE, reason="judge down")
    assert buffer.counts == GroupCounts(drawn=1, failed=1)
    assert buffer._ledger.reasons() == {"judge down": 1}
    assert buffer._ledger.reported() == {"groups": 1}
    assert ordinals(await admitted(buffer)) == [1]


async def test_every_way_to_be_filtered_is_counted_apart():
    buffer = make_buffer()
    for permit, ending in zip(await admitted(buffer), ("all_right", "all_wrong", "overlong"), strict=False):
        assert not await complete(buffer, permit, ending)
    assert buffer.counts == GroupCounts(drawn=4, running=1, all_right=1, all_wrong=1, overlong=1)
    assert buffer.counts.filtered == 3


# Batches.


async def test_batches_are_cut_in_the_order_in_which_groups_were_drawn():
    buffer = make_buffer()
    for permit in reversed(await admitted(buffer)):
        await complete(buffer, permit)
    assert (await batch_now(buffer, 1)).payloads == (b"0", b"1")


async def test_groups_with_the_oldest_weights_are_trained_first():
    buffer = make_buffer(policy_version=1)
    for version in (2, 3):
        await buffer.mark_trained(version, version)
    permits = await admitted(buffer, policy_version=3)
    for permit, versions in zip(permits, [{3: 9}, {2: 1, 3: 8}, {3: 1}, {1: 5}], strict=True):
        await complete(buffer, permit, versions=versions)
    assert (await batch_now(buffer, 1)).payloads == (b"1", b"3")


async def test_learner_is_woken_when_the_batch_is_full():
    buffer = make_buffer()
    first, second, *_ = await admitted(buffer)
    waiter = await waiting(buffer.next_batch(1))
    await complete(buffer, second)
    await still_waiting(waiter)
    await complete(buffer, first)
    assert (await woken(waiter)).payloads == (b"0", b"1")


async def test_next_step_waits_until_the_batch_before_is_trained():
    buffer = make_buffer()
    for permit in await admitted(buffer):
        await complete(buffer, permit)
    await batch_now(buffer, 1)
    waiter = await waiting(buffer.next_batch(2))
    await buffer.mark_trained(1, 1)
    assert (await woken(waiter)).payloads == (b"2", b"3")


async def test_groups_of_a_refused_batch_are_not_trained():
    ledger = Ledger()
    buffer = make_buffer(ledger)
    for permit in await admitted(buffer):
        await complete(buffer, permit)
    await batch_now(buffer, 1)
    await buffer.mark_trained(1, 1, refused="the loss is not finite")
    assert buffer.counts == GroupCounts(drawn=4, ready=2, refused=2)
    assert (buffer.counts.balanced, ledger.trained_tasks()) == (True, [])
    assert (await batch_now(buffer, 2)).payloads == (b"2", b"3")


async def test_a_refused_batch_gives_its_places_back():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0)
    (permit,) = await admitted(buffer)
    await complete(buffer, permit)
    await batch_now(buffer, 1)
    assert await admitted(buffer) == []
    await buffer.mark_trained(1, 1, refused="no")
    assert ordinals(await admitted(buffer, policy_version=1)) == [1]


async def test_batch_says_what_ended_since_the_batch_before():
    buffer = make_buffer(batch_groups=1, pipeline_depth=3)
    permits = await admitted(buffer)
    await complete(buffer, permits[0], facts={"tokens": 5})
    await complete(buffer, permits[1], WRONG, facts={"tokens": 7})
    assert (await batch_now(buffer, 1)).facts == {"tokens": 12}
    await complete(buffer, permits[2], facts={"tokens": 1})
    await buffer.mark_trained(1, 1)
    batch = await batch_now(buffer, 2)
    assert batch.facts == {"tokens": 1}
    assert batch.counts == GroupCounts(drawn=4, running=1, in_batch=1, trained=1, all_wrong=1)


async def test_batch_says_how_old_its_versions_are():
    buffer = make_buffer(policy_version=5, max_staleness=3)
    for permit in await admitted(buffer, policy_version=5):
        await complete(buffer, permit, versions={5: 1})
    assert (await batch_now(buffer, 1)).version_ages == {5: 0}


async def test_other_calls_go_on_while_a_batch_is_read(path, monkeypatch):
    gate, reading = threading.Event(), Ledger.reading
    monkeypatch.setattr(Ledger, "aside", aside)
    monkeypatch.setattr(Ledger, "reading", lambda ledger: gate.wait(60) and reading(ledger))
    buffer = make_buffer(Ledger(path), batch_groups=1)
    first, second = await admitted(buffer)
    await complete(buffer, first)
    batch = await waiting(buffer.next_batch(1))
    assert await complete(buffer, second)
    assert buffer.counts.ready == 1
    await still_waiting(batch)
    gate.set()
    assert (await batch).payloads == (b"0",)


async def test_batch_that_a_rewind_took_back_while_it_was_read_is_cut_again(path, monkeypatch):
    buffer = make_buffer(Ledger(path), batch_groups=1)
    await complete(buffer, (await admitted(buffer))[0])
    rewinds = [buffer.rewind(0, 0, NOTHING_TRAINED)]

    async def rewound(ledger, look):
        if rewinds:
            await rewinds.pop()
        return look()

    monkeypatch.setattr(Ledger, "aside", rewound)
    assert (await batch_now(buffer, 1)).payloads == (b"0",)
    assert (rewinds, buffer.counts.in_batch) == ([], 1)


async def test_ledger_that_does_not_add_up_stops_the_next_batch(path):
    buffer = make_buffer(Ledger(path), batch_groups=1)
    for permit in await admitted(buffer):
        await complete(buffer, permit)
    Ledger(path).lease(1, 1, num_new=1)
    with pytest.raises(LedgerError, match="does not add up"):
        await batch_now(buffer, 1)


async def test_groups_that_ended_lately_tell_about_bias():
    now = iter(range(100))
    buffer = make_buffer(batch_groups=10, pipeline_depth=1, clock=lambda: float(next(now)))
    for permit in await admitted(buffer, free_places=20):
        slow = permit.ordinal >= 18
        await complete(buffer, permit, duration_s=9 if slow else 1, versions={0: 600 if slow else 100})
    bias = (await batch_now(buffer, 1)).bias
    # Groups 0 to 9 are trained, 100 tokens each; drawn were (18 * 100 + 2 * 600) / 20 = 150.
    assert bias == {"bias/length_trained_over_drawn": pytest.approx(100 / 150), "bias/slow_decile_share": 0}


# Staleness.


async def test_ready_group_that_is_too_stale_is_drawn_again_before_anything_else():
    buffer = make_buffer(batch_groups=1, pipeline_depth=2, max_staleness=0)
    first, second, _ = await admitted(buffer)
    await complete(buffer, first, versions={0: 10})
    await complete(buffer, second, versions={0: 10})
    await train(buffer, 1)
    assert buffer.counts == GroupCounts(drawn=4, queued=1, running=1, trained=1, expired=1)
    permits = await admitted(buffer, worker=1, policy_version=1)
    assert [(permit.ordinal, permit.task, permit.attempt) for permit in permits] == [(3, 1, 2), (4, 3, 1)]
    assert buffer._ledger.reasons() == {"older than version 1": 1}


async def test_a_tenth_of_fresh_tokens_keeps_a_group():
    buffer = make_buffer(batch_groups=1, pipeline_depth=2, max_staleness=1)
    first, kept, stale = await admitted(buffer)
    await complete(buffer, first)
    await complete(buffer, kept, versions={0: 90, 1: 10})
    await complete(buffer, stale, versions={0: 91, 1: 9})
    await train(buffer, 2)
    assert buffer.counts == GroupCounts(drawn=4, queued=1, ready=1, trained=1, expired=1)
    assert (await batch_now(buffer, 2)).payloads == (b"1",)


async def test_running_groups_are_never_cancelled_for_their_age():
    buffer = make_buffer(batch_groups=1, pipeline_depth=1, max_staleness=1, max_empty_batches=99)
    long, *others = await admitted(buffer)
    for step in range(1, 20):
        for permit in others:
            await complete(buffer, permit, versions={step - 1: 10})
        await train(buffer, step)
        others = await admitted(buffer, policy_version=step)
    assert leases_of(buffer._ledger, 0)[0] == long.lease
    assert await complete(buffer, long, versions={0: 500, 19: 100})
    assert (await batch_now(buffer, 20)).payloads == (b"0",)


async def test_group_that_comes_back_too_stale_is_drawn_again_at_once():
    buffer = make_buffer(batch_groups=1, pipeline_depth=2, max_staleness=0)
    late, other, _ = await admitted(buffer)
    await complete(buffer, other)
    await train(buffer, 1)
    await complete(buffer, late)
    assert buffer.counts == GroupCounts(drawn=4, queued=1, running=1, trained=1, expired=1)


async def test_group_of_weights_that_are_published_and_not_noted_yet_is_kept():
    """Between the two the learner's step is logged, and the policy may be evaluated for a minute."""
    buffer = make_buffer(batch_groups=1, pipeline_depth=2, max_staleness=8)
    first, wholly, mostly = await admitted(buffer)
    await complete(buffer, first)
    await batch_now(buffer, 1)
    assert await complete(buffer, wholly, versions={1: 100})
    assert await complete(buffer, mostly, versions={0: 5, 1: 95})
    assert (buffer.counts.ready, buffer.counts.expired) == (2, 0)
    await buffer.mark_trained(1, 1)
    assert (buffer.counts.ready, buffer.counts.expired) == (2, 0)


async def test_task_that_takes_too_long_each_time_is_trained_on_in_the_end():
    buffer = make_buffer(batch_groups=1, pipeline_depth=1, max_staleness=0, max_attempts=2, policy_version=5)
    first, _ = await admitted(buffer, policy_version=5)
    await complete(buffer, first, versions={4: 10})
    again, *_ = await admitted(buffer, policy_version=5)
    assert (again.ordinal, again.task, again.attempt) == (2, 0, 2)
    await complete(buffer, again, versions={4: 10})
    assert (buffer.counts.expired, buffer.counts.ready) == (1, 1)
    assert (await batch_now(buffer, 1)).payloads == (b"2",)


# Starvation.


async def test_starvation_ends_with_a_diagnosis_instead_of_a_hang():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0, max_empty_batches=2)
    for ending in (RIGHT, WRONG):
        (permit,) = await admitted(buffer)
        await complete(buffer, permit, ending)
    with pytest.raises(StarvedError, match="1 were all right, 1 all wrong, 0 overlong, 0 failed"):
        await batch_now(buffer, 1)


async def test_learner_that_waits_is_woken_by_starvation():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0, max_empty_batches=2)
    waiter = await waiting(buffer.next_batch(1))
    for _ in range(2):
        await still_waiting(waiter)
        (permit,) = await admitted(buffer)
        await complete(buffer, permit, WRONG)
    with pytest.raises(StarvedError, match="2 groups in a row carried no signal"):
        await woken(waiter)


async def test_starvation_names_the_reasons_of_failures():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0, max_empty_batches=2, max_attempts=1)
    for _ in range(2):
        (permit,) = await admitted(buffer)
        await complete(buffer, permit, UNSCORABLE, reason="judge down")
    with pytest.raises(StarvedError, match=r"2 failed.*2 x judge down"):
        await batch_now(buffer, 1)


async def test_attempts_that_are_made_again_starve_nobody():
    """Regression: an outage of seconds ended a run and advised easier tasks, for each attempt at a group counted as a
    group: 8 groups x 5 attempts made 40 where 10 batches of 4 are the bound."""
    buffer = make_buffer(batch_groups=4, max_empty_batches=10, max_attempts=6)
    for _ in range(5):
        for permit in await admitted(buffer):
            await complete(buffer, permit, UNSCORABLE, reason="search is down")
    with pytest.raises(TimeoutError):
        await batch_now(buffer, 1)
    assert (buffer.counts.failed, buffer.counts.queued) == (0, 8)
    for permit in await admitted(buffer):
        await complete(buffer, permit, UNSCORABLE, reason="search is down")
    assert buffer.counts.failed == 8


async def complete_in_a_row(buffer, *kinds):
    for ending in kinds:
        (permit,) = await admitted(buffer, free_places=1)
        await complete(buffer, permit, ending)


async def test_training_is_warned_at_a_third_of_the_bound():
    # Bound: 3 batches of 2 groups. A full batch waits already.
    buffer = make_buffer(pipeline_depth=3)
    await complete_in_a_row(buffer, MIXED, MIXED, MIXED, MIXED, WRONG)
    assert (await batch_now(buffer, 1)).warning is None
    await complete_in_a_row(buffer, WRONG)
    batch = await batch_now(buffer, 1)
    assert batch.warning.startswith("2 groups in a row carried no signal (bound 6); of all 6 drawn, 0 were all right")


async def test_batch_is_smaller_at_two_thirds_of_the_bound():
    buffer = make_buffer(pipeline_depth=3)
    await complete_in_a_row(buffer, MIXED, WRONG, WRONG, WRONG)
    with pytest.raises(TimeoutError):
        await batch_now(buffer, 1)
    await complete_in_a_row(buffer, WRONG)
    batch = await batch_now(buffer, 1)
    assert batch.payloads == (b"0",)
    assert "4 groups in a row" in batch.warning


async def test_learner_is_given_what_there_is_before_training_is_given_up():
    buffer = make_buffer(pipeline_depth=3)
    await complete_in_a_row(buffer, MIXED, *[WRONG] * 6)
    assert (await batch_now(buffer, 1)).payloads == (b"0",)
    await buffer.mark_trained(1, 1)
    with pytest.raises(StarvedError):
        await batch_now(buffer, 2)


async def test_one_group_with_signal_ends_the_row():
    buffer = make_buffer(pipeline_depth=3)
    await complete_in_a_row(buffer, *[WRONG] * 5, MIXED, *[WRONG] * 3)
    with pytest.raises(TimeoutError):
        await batch_now(buffer, 1)


# Closing.


async def test_close_wakes_everybody():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0)
    await admitted(buffer)
    admit, batch = await waiting(buffer.admit(make_status(worker=1))), await waiting(buffer.next_batch(1))
    await buffer.close()
    assert await woken(admit) == Admission(closed=True)
    with pytest.raises(BufferClosedError):
        await woken(batch)


async def test_closed_buffer_admits_nobody_any_more():
    buffer = make_buffer()
    await buffer.close()
    assert await buffer.admit(make_status()) == Admission(closed=True)


# Rewinding.


async def test_rewound_batches_are_trained_again_with_their_bytes():
    buffer = make_buffer()
    for permit in await admitted(buffer):
        await complete(buffer, permit)
    await train(buffer, 1)
    await batch_now(buffer, 2)
    await buffer.rewind(0, 2, NOTHING_TRAINED)
    assert buffer.counts == GroupCounts(drawn=4, ready=4)
    assert (await batch_now(buffer, 1)).payloads == (b"0", b"1")
    assert await admitted(buffer, policy_version=2) == []


async def test_rewinding_wakes_the_learner():
    buffer = make_buffer(batch_groups=1)
    permit, _ = await admitted(buffer)
    await complete(buffer, permit)
    await train(buffer, 1)
    waiter = await waiting(buffer.next_batch(1))
    await buffer.rewind(0, 2, NOTHING_TRAINED)
    assert (await woken(waiter)).payloads == (b"0",)


async def test_rewound_groups_are_made_no_staler_by_the_new_number_of_the_weights():
    buffer = make_buffer(batch_groups=1, max_staleness=2)
    permit, _ = await admitted(buffer)
    await complete(buffer, permit)
    await train(buffer, 1)
    await buffer.rewind(0, 9, NOTHING_TRAINED)
    assert buffer.counts == GroupCounts(drawn=2, running=1, ready=1)
    ages = (await batch_now(buffer, 1)).version_ages
    assert (ages[0], ages[1], ages[9]) == (0, 1, 0)


# The end of the tasks.


async def test_last_batch_is_smaller_and_then_there_is_none():
    buffer = make_buffer(max_tasks=3)
    permits = await admitted(buffer)
    assert ordinals(permits) == [0, 1, 2]
    for permit in permits:
        await complete(buffer, permit)
    await train(buffer, 1)
    assert (await batch_now(buffer, 2)).payloads == (b"2",)
    await buffer.mark_trained(2, 2)
    assert await batch_now(buffer, 3) is None
    assert await batch_now(buffer, 3) is None
    assert await admitted(buffer, policy_version=2) == []


async def test_last_batch_waits_for_what_still_runs_or_is_to_be_run_again():
    buffer = make_buffer(max_tasks=2, pipeline_depth=2)
    first, _ = await admitted(buffer)
    await complete(buffer, first)
    waiter = await waiting(buffer.next_batch(1))
    await buffer.release(0, "lost")
    await still_waiting(waiter)
    (again,) = await admitted(buffer, worker=1)
    await complete(buffer, again, WRONG)
    assert (await woken(waiter)).payloads == (b"0",)


async def test_learner_that_waits_is_woken_by_the_end():
    buffer = make_buffer(max_tasks=1)
    (permit,) = await admitted(buffer)
    waiter = await waiting(buffer.next_batch(1))
    await complete(buffer, permit, WRONG)
    assert await woken(waiter) is None


async def test_task_that_expired_near_the_end_is_still_trained():
    buffer = make_buffer(batch_groups=1, pipeline_depth=2, max_staleness=0, max_tasks=2)
    for permit in await admitted(buffer):
        await complete(buffer, permit)
    await train(buffer, 1)
    with pytest.raises(TimeoutError):
        await batch_now(buffer, 2)
    (again,) = await admitted(buffer, policy_version=1)
    await complete(buffer, again, versions={1: 10})
    await train(buffer, 2)
    assert await batch_now(buffer, 3) is None
    assert buffer._ledger.trained_tasks() == [0, 1]


# A synchronous run that is killed.


async def test_round_that_was_cut_off_is_played_again_as_a_whole(path):
    buffer = make_buffer(Ledger(path), pipeline_depth=0)
    first, _ = await admitted(buffer)
    await complete(buffer, first)
    ledger = Ledger(killed(path))
    buffer = make_buffer(ledger, pipeline_depth=0)
    assert (await buffer.release(None, "the run was cut off")).num_groups == 1
    assert ordinals(await admitted(buffer, worker=1)) == [0, 1]


async def test_round_whose_worker_was_lost_is_played_again_as_a_whole():
    buffer = make_buffer(pipeline_depth=0, batch_groups=3)
    first, second, _ = await admitted(buffer)
    await complete(buffer, first)
    await complete(buffer, second, WRONG)
    await buffer.release(0, "killed")
    assert buffer.counts == GroupCounts(drawn=3, queued=3)
    assert [(one.ordinal, one.attempt) for one in await admitted(buffer, worker=1)] == [(0, 1), (1, 1), (2, 2)]


async def test_what_another_worker_has_ended_stays_when_one_of_a_round_is_lost():
    buffer = make_buffer(pipeline_depth=0, batch_groups=4)
    await buffer.prove(1, 0)
    mine, theirs = await admitted(buffer), await admitted(buffer, worker=1)
    assert (ordinals(mine), ordinals(theirs)) == ([0, 1], [2, 3])
    await complete(buffer, mine[0])
    await complete(buffer, theirs[0])
    await buffer.release(0, "killed")
    assert buffer.counts == GroupCounts(drawn=4, queued=2, running=1, ready=1)
    assert await complete(buffer, theirs[1])
    assert ordinals(await admitted(buffer)) == [0, 1]


async def test_asynchronous_run_keeps_what_a_lost_worker_had_ended():
    buffer = make_buffer(pipeline_depth=1)
    first, *_ = await admitted(buffer)
    await complete(buffer, first)
    await buffer.release(0, "killed")
    assert buffer.counts == GroupCounts(drawn=4, queued=3, ready=1)


async def test_smaller_batch_of_a_synchronous_run_is_not_cut_before_a_round_is_played_again():
    buffer = make_buffer(pipeline_depth=0, batch_groups=2, max_empty_batches=1)
    first, second = await admitted(buffer)
    await complete(buffer, second, WRONG)
    await complete(buffer, first)
    (refill,) = await admitted(buffer)
    await complete(buffer, refill, WRONG)
    (refill,) = await admitted(buffer)
    await buffer.release(0, "killed")
    assert buffer._guard.relaxes
    with pytest.raises(TimeoutError):
        await batch_now(buffer, 1)
    (refill,) = await admitted(buffer, worker=1)
    await complete(buffer, refill)
    assert (await batch_now(buffer, 1)).payloads == (b"0", b"3")


async def test_groups_that_are_played_again_starve_nobody(path):
    ledger = Ledger(path)
    buffer = make_buffer(ledger, pipeline_depth=0, batch_groups=3, max_empty_batches=1)
    first, second, _ = await admitted(buffer)
    for again in range(3):
        await complete(buffer, first, WRONG)
        await complete(buffer, second, WRONG)
        await buffer.release(None, f"killed {again}")
        first, second, last = await admitted(buffer)
    assert not buffer._guard.warns
    await complete(buffer, last)
    await complete(buffer, first, WRONG)
    await complete(buffer, second)
    with pytest.raises(TimeoutError):
        await batch_now(buffer, 1)


def play_synchronously(*, seed, kills, losses=(), num_steps=4, max_tasks=None):
    """What is trained in each step, when everything is killed at these events, or the worker is lost, and every second
    step is a checkpoint. What a group brings follows from its task and family, the weights, and what is sampled
    together with it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "first" / "ledger.db"
        path.parent.mkdir()
        return asyncio.run(_play_synchronously(path, seed, set(kills), set(losses), num_steps, max_tasks))


async def _play_synchronously(path, seed, kills, losses, num_steps, max_tasks):
    trained, step, version, checkpoint, num_events = {}, 0, 0, 0, 0
    ledger = Ledger(path)
    choice = LearnableChoice(names=("chain", "lookup"), seed=seed)
    rules = {
        "pipeline_depth": 0,
        "batch_groups": 3,
        "max_empty_batches": 99,
        "max_tasks": max_tasks,
        "choice": choice,
    }
    buffer = make_buffer(ledger, **rules)

    def is_killed():
        nonlocal num_events
        num_events += 1
        return num_events in kills

    async def play_a_round():
        """What the worker is given now, and the one that comes after it. False where it was cut off."""
        permits = await admitted(buffer, policy_version=version)
        together = ordinals(permits)
        for permit in permits:
            if is_killed():
                return False
            if num_events in losses:
                await buffer.release(0, "lost")
                return await play_a_round()
            luck = random.Random(f"{seed} {step} {permit.ordinal} {permit.family} {together}")
            ending = luck.choice([MIXED, MIXED, RIGHT, WRONG])
            await buffer.complete(
                permit.lease,
                make_result(
                    ending,
                    payload=json.dumps([step, permit.task, permit.family, luck.random()]).encode(),
                    versions={version: 1},
                    right={RIGHT: 4, WRONG: 0}.get(ending, luck.randint(1, 3)),
                    scored=4,
                ),
            )
        return not is_killed()

    async def train_a_step():
        """False where it was cut off; None where there was nothing left to train. The worker is always faster to ask
        than the learner."""
        nonlocal step, version, checkpoint
        while True:
            if not await play_a_round():
                return False
            with contextlib.suppress(TimeoutError):
                batch = await batch_now(buffer, step + 1)
                break
        if batch is None:
            return None
        if not await play_a_round():
            return False
        step, version = step + 1, version + 1
        trained[step] = batch.payloads
        await buffer.mark_trained(step, version)
        checkpoint = step if step % 2 == 0 else checkpoint
        return not is_killed()

    while step < num_steps:
        went_on = await train_a_step()
        if went_on is None:
            break
        if not went_on:
            path, step, version = killed(path), checkpoint, version + 1
            ledger = Ledger(path)
            buffer = make_buffer(ledger, **rules)
            await buffer.rewind(step, version, trained_until(ledger, step))
            await buffer.release(None, "killed")
    return trained


@example(seed=0, kills=[12], losses=[], max_tasks=None)
@example(seed=0, kills=[], losses=[2], max_tasks=None)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 99),
    kills=st.lists(st.integers(1, 40), max_size=3, unique=True),
    # A second loss in one round would have its groups run alone.
    losses=st.lists(st.sampled_from(range(2, 41, 6)), max_size=3, unique=True),
    max_tasks=st.none() | st.integers(1, 12),
)
def test_synchronous_run_that_is_killed_trains_what_one_that_is_not_trains(seed, kills, losses, max_tasks):
    undisturbed = play_synchronously(seed=seed, kills=(), max_tasks=max_tasks)
    assert play_synchronously(seed=seed, kills=kills, losses=losses, max_tasks=max_tasks) == undisturbed


# Faults that were there once.


async def test_two_calls_for_one_step_that_wait_together_get_the_same_batch():
    buffer = make_buffer()
    first, second = await waiting(buffer.next_batch(1)), await waiting(buffer.next_batch(1))
    for permit in await admitted(buffer):
        await complete(buffer, permit)
    assert await woken(first) == await woken(second)


async def test_depth_zero_admits_nothing_while_a_smaller_batch_is_in_training():
    buffer = make_buffer(pipeline_depth=0, max_empty_batches=1)
    first, second = await admitted(buffer)
    await complete(buffer, first)
    await complete(buffer, second, WRONG)
    assert (await batch_now(buffer, 1)).payloads == (b"0",)
    assert await admitted(buffer) == []
    await buffer.mark_trained(1, 1)
    assert len(await admitted(buffer, policy_version=1)) == 2


async def test_queued_groups_wait_for_a_place_while_a_rewound_batch_has_it():
    buffer = make_buffer(pipeline_depth=0)
    for permit in await admitted(buffer):
        await complete(buffer, permit)
    await train(buffer, 1)
    await admitted(buffer, policy_version=1)
    await buffer.release(0, "killed")
    await buffer.rewind(0, 2, NOTHING_TRAINED)
    assert buffer.counts == GroupCounts(drawn=4, queued=2, ready=2)
    assert await admitted(buffer, policy_version=2) == []
    await train(buffer, 1, policy_version=3)
    permits = await admitted(buffer, policy_version=3)
    assert ordinals(permits) == [2, 3]


async def test_task_of_an_expired_group_is_not_lost_wherever_the_buffer_is_killed(path):
    ledger = Ledger(path)
    buffer = make_buffer(ledger, batch_groups=1, pipeline_depth=2, max_staleness=0)
    for permit in await admitted(buffer):
        await complete(buffer, permit)
    await batch_now(buffer, 1)
    left = []
    ledger._db.set_trace_callback(
        lambda statement: left.append(killed(path)) if statement.startswith("BEGIN") else None
    )
    await buffer.mark_trained(1, 1)
    ledger._db.set_trace_callback(None)
    assert len(left) >= 2
    for path in left:
        counts = Ledger(path).verify()
        assert counts.drawn - counts.expired == 3


async def test_depth_zero_does_not_give_up_while_a_group_with_signal_waits_for_the_end_of_the_round():
    buffer = make_buffer(pipeline_depth=0, max_empty_batches=1)
    first, second = await admitted(buffer)
    await complete(buffer, first)
    await complete(buffer, second, WRONG)
    await complete(buffer, (await admitted(buffer))[0], WRONG)
    (last,) = await admitted(buffer)
    waiter = await waiting(buffer.next_batch(1))
    await complete(buffer, last)
    assert (await woken(waiter)).payloads == (b"0", b"3")


async def test_call_of_a_worker_that_is_released_while_it_waits_gets_no_work_and_no_error():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0)
    (permit,) = await admitted(buffer)
    waiter = await waiting(buffer.admit(make_status(running=(permit.lease,))))
    await buffer.release(0, "no heartbeat")
    await buffer.prove(0, 0)
    assert await woken(waiter) == Admission()
    assert [permit.lease for permit in await admitted(buffer, worker=1)] == [(0, 2)]


async def test_worker_that_has_proven_nothing_yet_gets_no_work():
    buffer = make_buffer()
    assert await admitted(buffer, policy_version=-1) == []
    await buffer.prove(0, 0)
    assert len(await admitted(buffer, policy_version=-1)) == 4


async def test_diagnosis_does_not_call_expired_groups_failed():
    buffer = make_buffer(batch_groups=1, pipeline_depth=2, max_staleness=0, max_empty_batches=1)
    first, second, third = await admitted(buffer)
    await complete(buffer, first)
    await complete(buffer, second)
    await train(buffer, 1)
    await complete(buffer, third, WRONG)
    with pytest.raises(StarvedError) as error:
        await batch_now(buffer, 2)
    assert "0 failed (" not in str(error.value)


async def test_learner_that_waited_through_a_row_without_signal_is_warned():
    buffer = make_buffer(pipeline_depth=3)
    await complete_in_a_row(buffer, WRONG, WRONG, WRONG, MIXED, MIXED)
    assert "3 groups in a row carried no signal" in (await batch_now(buffer, 1)).warning


async def test_killing_the_buffer_does_not_put_starvation_off(path):
    now = iter(range(100))
    buffer = make_buffer(Ledger(path), pipeline_depth=3, clock=lambda: float(next(now)))
    await complete_in_a_row(buffer, MIXED, WRONG, WRONG, WRONG, WRONG)
    buffer = make_buffer(Ledger(killed(path)), pipeline_depth=3)
    assert (await batch_now(buffer, 1)).payloads == (b"0",)


async def test_run_that_is_cut_off_again_and_again_fails_no_group():
    buffer = make_buffer(batch_groups=1, max_attempts=2)
    for _ in range(3):
        assert ordinals(await admitted(buffer)) == [0, 1]
        await buffer.release(None, "the run was cut off")
    assert buffer.counts == GroupCounts(drawn=2, queued=2)


async def test_result_that_could_not_be_written_may_be_brought_again(monkeypatch):
    buffer = make_buffer(batch_groups=1, pipeline_depth=0)
    (permit,) = await admitted(buffer)

    def full(*_, **__):
        raise LedgerError("cannot write the ledger: disk full")

    with monkeypatch.context() as patched:
        patched.setattr(buffer._ledger, "settle", full)
        with pytest.raises(LedgerError):
            await complete(buffer, permit)
    assert await complete(buffer, permit)
    assert buffer.counts == GroupCounts(drawn=1, ready=1)


async def test_closed_buffer_gives_out_no_lost_permits_either():
    buffer = make_buffer()
    await admitted(buffer)
    await buffer.close()
    assert await buffer.admit(make_status()) == Admission(closed=True)


# Any order of events.


class Life(RuleBasedStateMachine):
    """Workers, learner and crashes in any order. Kept beside the buffer: what each worker knows that it runs, which
    groups were trained in which step, and the version numbers that were given out."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="ledger-"))
        self.ledgers = []
        self.choice = LearnableChoice(names=("chain", "lookup"), seed=0)
        self.draws = {}

    @initialize(
        depth=st.integers(0, 2), batch_groups=st.integers(1, 3), max_tasks=st.none() | st.integers(1, 9), data=st.data()
    )
    def begin(self, depth, batch_groups, max_tasks, data):
        self.settings = BufferSettings(
            batch_groups=batch_groups,
            pipeline_depth=depth,
            max_staleness=data.draw(st.integers(depth, 3)),
            max_attempts=3,
            max_empty_batches=10**6,
            max_tasks=max_tasks,
        )
        self.places = (depth + 1) * batch_groups
        self.bound = self.places
        self.path = self.folder / "first" / "ledger.db"
        self.path.parent.mkdir()
        self.version = 0
        self.open()
        self.known = {0: {}, 1: {}}
        self.proven = {0: 0, 1: 0}
        self.old_leases = [(0, 1)]
        self.trained_in = {}
        self.refused_steps = set()
        self.in_batch = ()
        self.step, self.forgotten = 0, 0
        self.failed_with_facts = 0
        self.calls = []

    def open(self):
        self.ledger = Ledger(self.path)
        self.ledgers.append(self.ledger)
        self.buffer = GroupBuffer(
            self.settings, self.ledger, policy_version=self.version, clock=lambda: 0.0, choice=self.choice
        )

    def play(self, awaitable):
        return self.loop.run_until_complete(awaitable)

    def publish(self):
        self.version += 1
        return self.version

    def runs(self, lease):
        return lease in leases_of(self.ledger, 0) + leases_of(self.ledger, 1)

    @rule(worker=st.integers(0, 1), free_places=st.integers(0, 4), lost=st.booleans())
    def admit(self, worker, free_places, lost):
        unknown = [lease for lease in leases_of(self.ledger, worker) if lease not in self.known[worker]]
        status = make_status(
            worker=worker,
            policy_version=self.proven[worker],
            running=tuple(self.known[worker]),
            free_places=free_places,
        )
        permits = self.play(self.buffer.admit(status, patience_s=0)).permits
        if unknown:
            assert [permit.lease for permit in permits] == unknown
        else:
            assert len(permits) <= free_places
            assert not permits or self.version - self.settings.pipeline_depth <= self.proven[worker]
        if not lost:
            self.known[worker] |= {permit.lease: permit for permit in permits}

    @rule(worker=st.integers(0, 1), free_places=st.integers(1, 4))
    def wait_for_work(self, worker, free_places):
        status = make_status(
            worker=worker,
            policy_version=self.proven[worker],
            running=tuple(self.known[worker]),
            free_places=free_places,
        )
        self.calls.append((status, self.loop.create_task(self.buffer.admit(status))))

    @invariant()
    def who_waits_is_given_what_there_is(self):
        for _ in range(3):
            self.play(asyncio.sleep(0))
        answered = [(status, call.result()) for status, call in self.calls if call.done()]
        self.calls = [(status, call) for status, call in self.calls if not call.done()]
        for status, admission in answered:
            assert len(admission.permits) <= max(status.free_places, self.places)
            self.known[status.worker] |= {permit.lease: permit for permit in admission.permits}
        admitter = self.buffer._admitter
        # A suspect waits for the one worker that tries suspects.
        for_all = admitter.num_available() > len(admitter.waiting_suspects())
        could = {status.worker for status, _ in self.calls if for_all or admitter.tries_suspects(status.worker)}
        assert not admitter.num_available() or all(admitter.room(worker) <= 0 for worker in could)

    def forget_calls(self):
        for _, call in self.calls:
            call.cancel()
        self.play(asyncio.sleep(0))
        self.calls = []

    @precondition(lambda self: any(self.known.values()))
    @rule(data=st.data(), ending=st.sampled_from([MIXED, MIXED, RIGHT, WRONG, UNSCORABLE]))
    def complete(self, data, ending):
        worker = data.draw(st.sampled_from([worker for worker in self.known if self.known[worker]]))
        lease = data.draw(st.sampled_from(sorted(self.known[worker])))
        del self.known[worker][lease]
        self.answer(lease, ending, self.proven[worker])
        self.old_leases.append(lease)

    @rule(data=st.data(), ending=st.sampled_from([MIXED, WRONG, UNSCORABLE]))
    def complete_again(self, data, ending):
        """By a worker that was taken for dead, or because the first answer was lost."""
        lease = data.draw(st.sampled_from(self.old_leases))
        if not self.runs(lease):
            before = self.buffer.counts
            assert not self.answer(lease, ending, 0)
            assert self.buffer.counts == before

    def answer(self, lease, ending, version):
        held, num_failed = self.runs(lease), self.buffer.counts.failed
        payload = b"%d" % lease[0]
        right, scored = {MIXED: (1, 2), RIGHT: (2, 2), WRONG: (0, 2), UNSCORABLE: (0, 1)}[ending]
        result = make_result(
            ending, payload=payload, versions={version: 10}, reason="unscorable", right=right, scored=scored
        )
        kept = self.play(self.buffer.complete(lease, result))
        assert kept == (held and ending == MIXED)
        self.failed_with_facts += self.buffer.counts.failed - num_failed
        return kept

    @rule(worker=st.integers(0, 1))
    def lose_worker(self, worker):
        """Its successor has the same number and has proven nothing yet."""
        before = self.buffer.counts
        num = self.play(self.buffer.release(worker, "lost")).num_groups
        if self.calls:
            # Others that wait may take over at once.
            assert before.running - num <= self.buffer.counts.running
        else:
            assert before.running - num == self.buffer.counts.running
        self.old_leases += self.known[worker]
        self.known[worker], self.proven[worker] = {}, 0

    @rule(worker=st.integers(0, 1))
    def load_newest_weights(self, worker):
        self.proven[worker] = self.version
        self.play(self.buffer.prove(worker, self.version))

    @precondition(lambda self: not self.in_batch)
    @rule()
    def next_batch(self):
        counts, in_round = self.buffer.counts, self.settings.pipeline_depth == 0 and self.buffer.counts.running
        try:
            batch = self.play(batch_now(self.buffer, self.step + 1))
        except TimeoutError:
            assert in_round or counts.ready < self.settings.batch_groups
            return
        if batch is None:
            assert self.ended()
            return
        assert 1 <= len(batch.payloads) <= self.settings.batch_groups
        assert len(batch.payloads) == self.settings.batch_groups or self.buffer.counts.ready == 0
        self.in_batch = tuple(map(int, batch.payloads))
        assert not set(self.in_batch) & set(self.trained_in)
        assert self.play(batch_now(self.buffer, self.step + 1)) == batch
        assert sum(self.ledger.reported(step).get("groups", 0) for step in range(1, self.step + 2)) == self.num_ended()

    @precondition(lambda self: self.in_batch)
    @rule(twice=st.booleans(), refused=st.none() | st.just("no"))
    def mark_trained(self, twice, refused):
        self.step += 1
        self.refused_steps = {step for step in self.refused_steps if step < self.step} | (
            {self.step} if refused else set()
        )
        self.trained_in |= dict.fromkeys(self.in_batch, self.step)
        self.in_batch = ()
        version = self.publish()
        for _ in range(1 + twice):
            self.play(self.buffer.mark_trained(self.step, version, refused=refused))

    @rule()
    def forget(self):
        self.forgotten = self.step
        self.ledger.forget(self.step)

    @rule(data=st.data())
    def rewind(self, data):
        self.rewind_to(data.draw(st.integers(self.forgotten, self.step)))

    def rewind_to(self, step):
        self.step, self.in_batch = step, ()
        self.trained_in = {ordinal: at for ordinal, at in self.trained_in.items() if at <= step}
        self.play(self.buffer.rewind(step, self.publish(), trained_until(self.ledger, step)))
        self.bound = max(self.bound, self.buffer.counts.outstanding)

    @rule(learner_too=st.booleans(), workers_too=st.booleans())
    def kill(self, learner_too, workers_too):
        """The buffer is killed, alone or with others."""
        counts, weights = self.buffer.counts, self.choice.weights(self.ledger.outcomes)
        self.forget_calls()
        self.path = killed(self.path)
        self.open()
        assert (self.buffer.counts, self.choice.weights(self.ledger.outcomes)) == (counts, weights)
        if workers_too:
            self.play(self.buffer.release(None, "killed"))
            self.known, self.proven = {0: {}, 1: {}}, {0: 0, 1: 0}
            assert self.buffer.counts.running == 0
        if learner_too:
            self.rewind_to(self.forgotten)

    def num_ended(self):
        counts = self.buffer.counts
        kept = counts.ready + counts.in_batch + counts.trained + counts.refused + counts.expired
        return kept + counts.filtered + self.failed_with_facts

    def ended(self):
        max_tasks, counts = self.settings.max_tasks, self.buffer.counts
        return max_tasks is not None and self.ledger.next_task == max_tasks and counts.outstanding == 0

    @invariant()
    def ledger_adds_up(self):
        assert self.ledger.verify().balanced

    @invariant()
    def counts_kept_in_memory_are_those_of_the_file(self):
        assert self.ledger.verify_live() == self.ledger.verify()
        admitter, leases = self.buffer._admitter, self.ledger.leases()
        assert admitter.runs == {permit.lease: worker for worker, permit in leases}
        for worker in (0, 1):
            assert admitter.num_running(worker) == [one for one, _ in leases].count(worker)
            assert admitter.runs_of(worker) == sorted(leases_of(self.ledger, worker))
        for worker in (0, 1):
            nothing = WorkerStatus(worker=worker, policy_version=0, running=(), free_places=0)
            mine = [permit for one, permit in leases if one == worker]
            assert admitter.lost(nothing) == sorted(mine, key=lambda permit: permit.lease)

    @invariant()
    def every_task_has_one_group_that_did_not_expire(self):
        counts = self.buffer.counts
        assert counts.drawn - counts.expired == self.ledger.next_task
        assert self.settings.max_tasks is None or self.ledger.next_task <= self.settings.max_tasks

    @invariant()
    def what_a_task_is_gets_decided_once(self):
        for _, permit in self.ledger.leases():
            draw = permit.family, permit.made_of
            assert self.draws.setdefault(permit.task, draw) == draw

    @invariant()
    def open_tasks_are_those_that_run_or_are_queued(self):
        counts, open_tasks = self.buffer.counts, self.ledger.open_tasks()
        assert {permit.made_of for _, permit in self.ledger.leases()} <= open_tasks
        assert len(open_tasks) <= counts.queued + counts.running

    @invariant()
    def what_is_believed_of_families_is_of_the_groups_that_ended(self):
        num = sum(len(self.ledger.outcomes(family, 10**6)) for family in self.choice.names)
        assert num == self.num_ended()

    @invariant()
    def places_are_never_exceeded_and_only_rewinding_takes_more(self):
        outstanding = self.buffer.counts.outstanding
        assert outstanding <= self.bound
        self.bound = max(self.places, outstanding)

    @invariant()
    def trained_groups_are_those_of_the_steps_so_far_that_were_taken(self):
        refused = [step in self.refused_steps for step in self.trained_in.values()]
        assert self.buffer.counts.trained == refused.count(False)
        assert self.buffer.counts.refused == refused.count(True)
        assert self.buffer.counts.in_batch == len(self.in_batch)

    @invariant()
    def facts_are_of_the_groups_that_ended(self):
        assert self.ledger.reported().get("groups", 0) == self.num_ended()

    def teardown(self):
        try:
            if hasattr(self, "buffer"):
                self.forget_calls()
                self.play_to_the_end()
        finally:
            for ledger in self.ledgers:
                ledger.close()
            self.loop.close()
            shutil.rmtree(self.folder)

    def play_to_the_end(self):
        """From wherever it is, training goes on when everybody does what they should."""
        goal = self.step + 3
        for _ in range(100):
            if self.step == goal or self.ended():
                break
            self.play_one_round()
        assert self.step == goal or self.ended()
        if self.ended():
            assert self.play(batch_now(self.buffer, self.step + 1)) is None
            assert len(set(self.ledger.trained_tasks())) == self.buffer.counts.trained
            assert self.buffer.counts.drawn - self.buffer.counts.expired == self.settings.max_tasks

    def play_one_round(self):
        before = self.buffer.counts, self.step
        for worker in (0, 1):
            self.load_newest_weights(worker)
            self.admit(worker, free_places=4, lost=False)
        for _, permit in self.ledger.leases():
            self.answer(permit.lease, MIXED, self.version)
        self.known = {0: {}, 1: {}}
        if not self.in_batch:
            self.next_batch()
        if self.in_batch:
            self.mark_trained(twice=False, refused=None)
        assert (self.buffer.counts, self.step) != before or self.ended()


def test_any_order_of_events_keeps_the_ledger_balanced_and_never_deadlocks():
    run_state_machine_as_test(Life, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))
