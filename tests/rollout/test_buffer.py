import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.buffer import BufferClosedError, GroupBuffer, StarvedError, admission_capacity

MIXED, RIGHT, WRONG, UNSCORABLE = [1, 0], [1, 1], [0, 0], [None, None]


def make_buffer(*, batch_groups=2, pipeline_depth=1, max_empty_batches=3):
    return GroupBuffer(batch_groups=batch_groups, pipeline_depth=pipeline_depth, max_empty_batches=max_empty_batches)


def balances(buffer):
    counts = buffer.counts
    return counts.drawn == counts.trained + counts.filtered + counts.failed + counts.outstanding


def test_capacity_is_depth_plus_one_batches_less_what_is_outstanding():
    assert admission_capacity(pipeline_depth=0, batch_groups=4, outstanding=0) == 4
    assert admission_capacity(pipeline_depth=2, batch_groups=4, outstanding=5) == 7
    assert admission_capacity(pipeline_depth=1, batch_groups=4, outstanding=9) == 0


async def test_filtered_group_gives_its_place_back_at_once():
    buffer = make_buffer()
    permits = await buffer.admit(10)
    assert len(permits) == 4
    waiter = asyncio.create_task(buffer.admit(10))
    await asyncio.sleep(0)
    assert not waiter.done()
    assert not await buffer.complete(permits[0].ordinal, "a", RIGHT)
    assert [permit.ordinal for permit in await waiter] == [4]


async def test_batch_in_training_counts_as_outstanding_until_it_is_marked_trained():
    buffer = make_buffer()
    permits = await buffer.admit(10)
    for permit in permits[:2]:
        await buffer.complete(permit.ordinal, permit.ordinal, MIXED)
    assert await buffer.next_batch() == [0, 1]
    waiter = asyncio.create_task(buffer.admit(10))
    await asyncio.sleep(0)
    assert not waiter.done()
    await buffer.mark_trained(1)
    assert [permit.ordinal for permit in await waiter] == [4, 5]
    assert balances(buffer)


async def test_batches_are_cut_in_the_order_in_which_groups_were_drawn():
    buffer = make_buffer()
    permits = await buffer.admit(10)
    for permit in reversed(permits):
        await buffer.complete(permit.ordinal, permit.ordinal, MIXED)
    assert await buffer.next_batch() == [0, 1]


async def test_depth_zero_admits_nothing_before_the_batch_is_trained_and_asks_for_its_version():
    buffer = make_buffer(pipeline_depth=0)
    first = await buffer.admit(10)
    assert [permit.min_policy_version for permit in first] == [0, 0]
    for permit in first:
        await buffer.complete(permit.ordinal, permit.ordinal, MIXED)
    await buffer.next_batch()
    waiter = asyncio.create_task(buffer.admit(10))
    await asyncio.sleep(0)
    assert not waiter.done()
    await buffer.mark_trained(7)
    assert [permit.min_policy_version for permit in await waiter] == [7, 7]


async def test_depth_allows_that_many_versions_of_lag():
    buffer = make_buffer(pipeline_depth=2)
    permits = await buffer.admit(2)
    for permit in permits:
        await buffer.complete(permit.ordinal, permit.ordinal, MIXED)
    await buffer.next_batch()
    await buffer.mark_trained(5)
    assert {permit.min_policy_version for permit in await buffer.admit(10)} == {3}


async def test_depth_zero_refills_in_rounds_so_that_batches_do_not_depend_on_who_is_first():
    buffer = make_buffer(pipeline_depth=0)
    permits = await buffer.admit(10)
    await buffer.complete(permits[0].ordinal, "a", WRONG)
    waiter = asyncio.create_task(buffer.admit(10))
    await asyncio.sleep(0)
    assert not waiter.done()
    await buffer.complete(permits[1].ordinal, "b", MIXED)
    assert len(await waiter) == 1


async def test_starvation_ends_with_a_diagnosis_instead_of_a_hang():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0, max_empty_batches=2)
    for outcomes in (RIGHT, WRONG):
        (permit,) = await buffer.admit(10)
        await buffer.complete(permit.ordinal, "x", outcomes)
    with pytest.raises(StarvedError, match="1 were all right, 1 all wrong, 0 failed"):
        await buffer.next_batch()


async def test_unscorable_group_is_failed_not_filtered():
    buffer = make_buffer()
    (permit, *_) = await buffer.admit(10)
    await buffer.complete(permit.ordinal, "x", UNSCORABLE)
    assert (buffer.counts.failed, buffer.counts.filtered) == (1, 0)


async def test_close_wakes_everybody():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0)
    await buffer.admit(10)
    admit, batch = asyncio.create_task(buffer.admit(10)), asyncio.create_task(buffer.next_batch())
    await asyncio.sleep(0)
    await buffer.close()
    assert await admit == []
    with pytest.raises(BufferClosedError):
        await batch


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(0, 3),
    batch_groups=st.integers(1, 4),
    outcomes=st.lists(st.sampled_from([MIXED, RIGHT, WRONG, UNSCORABLE]), min_size=1, max_size=60),
    order=st.randoms(use_true_random=False),
)
def test_any_order_of_events_keeps_the_ledger_balanced_and_never_deadlocks(depth, batch_groups, outcomes, order):
    async def play():
        buffer = make_buffer(batch_groups=batch_groups, pipeline_depth=depth, max_empty_batches=len(outcomes) + 1)
        running, left, version = [], list(outcomes), 0
        while left:
            with contextlib.suppress(TimeoutError):
                running += await asyncio.wait_for(buffer.admit(order.randint(1, 8)), 0.001)
            assert balances(buffer)
            assert buffer.counts.outstanding <= (depth + 1) * batch_groups
            while running and left:
                permit = running.pop(order.randrange(len(running)))
                await buffer.complete(permit.ordinal, permit.ordinal, left.pop())
                assert balances(buffer)
            settled = depth > 0 or not running
            if buffer.counts.ready >= batch_groups and settled:
                batch = await asyncio.wait_for(buffer.next_batch(), 1)
                assert batch == sorted(batch)
                assert len(batch) == batch_groups
                version += 1
                await buffer.mark_trained(version)
            assert running or buffer.counts.outstanding < (depth + 1) * batch_groups
        assert balances(buffer)

    asyncio.run(play())
