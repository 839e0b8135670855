"""Results that come together are written down in one transaction, or in a few. That changes nothing but the number of
commits: any of them, in any order, leave the same ledger as when they come one by one."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import buffer as buffers
from rollout.buffer import BufferSettings, GroupBuffer, WorkerStatus
from rollout.store.ledger import Ledger
from rollout.store.ledger_file import LedgerError
from rollout.store.lifecycle import GroupResult

NUM_GROUPS = 8
SETTINGS = BufferSettings(
    batch_groups=NUM_GROUPS, pipeline_depth=0, max_staleness=0, max_attempts=2, max_empty_batches=1
)

lease = st.tuples(st.integers(0, NUM_GROUPS), st.integers(1, 2))
result = st.builds(
    GroupResult,
    ending=st.sampled_from(["ready", "all_right", "all_wrong", "overlong", None]),
    payload=st.binary(max_size=3),
    versions=st.dictionaries(st.integers(0, 1), st.integers(1, 9), max_size=2),
    facts=st.just({"groups": 1.0}),
    reason=st.sampled_from(["", "broken"]),
)
results = st.lists(st.tuples(lease, result), min_size=1, max_size=12)
"""Some of them of leases that nobody has, or has any more, and some twice."""


def make_buffer():
    """All groups run, and weights of version 0 are too old."""
    buffer = GroupBuffer(SETTINGS, Ledger(), policy_version=1, clock=lambda: 0.0)
    buffer._ledger.publish(0, 0)
    buffer._ledger.publish(1, 1)
    buffer._look_at_versions()
    return buffer


async def play(came_back, *, together):
    buffer = make_buffer()
    await buffer.admit(WorkerStatus(worker=0, policy_version=1, running=(), free_places=NUM_GROUPS), patience_s=0)
    calls = [buffer.complete(*one) for one in came_back]
    kept = await asyncio.gather(*calls) if together else [await call for call in calls]
    db = buffer._ledger._db
    tables = [list(map(tuple, db.execute(f"SELECT * FROM {name} ORDER BY ordinal"))) for name in ("groups", "payloads")]
    assert buffer._ledger.verify().balanced
    return kept, tables, buffer.counts, buffer._guard._num_without_signal, buffer._admitter.runs


@settings(max_examples=150, deadline=None)
@given(came_back=results, at_most=st.integers(1, 12))
def test_results_that_come_together_leave_what_the_same_leave_one_by_one(came_back, at_most):
    one_by_one = asyncio.run(play(came_back, together=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "MOST_TOGETHER", at_most)
        assert asyncio.run(play(came_back, together=True)) == one_by_one


async def test_of_very_many_results_others_have_their_turn_between_the_transactions(monkeypatch):
    monkeypatch.setattr(buffers, "MOST_TOGETHER", 2)
    buffer = make_buffer()
    status = WorkerStatus(worker=0, policy_version=1, running=(), free_places=NUM_GROUPS)
    permits = (await buffer.admit(status, patience_s=0)).permits
    outcome = GroupResult(ending="ready", payload=b"", versions={1: 1}, facts={})
    calls = [asyncio.create_task(buffer.complete(permit.lease, outcome)) for permit in permits]
    seen = set()
    while not all(call.done() for call in calls):
        await asyncio.sleep(0)
        seen.add(buffer.counts.ready)
    assert seen >= {2, 4, 6, 8}


@settings(max_examples=50, deadline=None)
@given(wanted=st.permutations(range(4)), num=st.integers(0, 4))
def test_cut_of_many_is_the_cut_of_each(wanted, num):
    ledger = Ledger()
    for permit in ledger.lease(0, 4, num_new=4):
        ledger.settle(permit.lease, "ready", GroupResult(ending="ready", payload=b"", versions={}, facts={}), now=0.0)
    ledger.cut(wanted[:num], 1)
    assert {ordinal for (ordinal, _), _ in ledger.ready()} == set(wanted[num:])
    assert ledger.verify().in_batch == num
    if num:
        with pytest.raises(LedgerError, match=f"of the 4 groups for step 2, {4 - num} are ready"):
            ledger.cut(wanted, 2)
        assert ledger.verify().in_batch == num
