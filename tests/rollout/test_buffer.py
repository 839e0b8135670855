import asyncio
from contextlib import suppress

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from configs.rollout import RolloutConfig
from configs.run import RunConfig
from reward.statistics import rollout_metrics
from rollout.buffer import GroupBuffer
from rollout.filters import NoSignalError
from rollout.lifecycle import Snapshot, State
from rollout.types import GroupSummary


def make_config(batch_groups, pipeline_depth, *, max_tries=6, **settings):
    """The settings of a buffer, also those that a whole run may not have."""
    settings |= {"rollout": RolloutConfig(max_tries=max_tries)}
    return RunConfig.model_construct(batch_groups=batch_groups, pipeline_depth=pipeline_depth, **settings)


def make_buffer(batch_groups=2, pipeline_depth=1, **settings):
    """Even tasks are of family `a`, odd ones of family `b`."""
    return GroupBuffer(make_config(batch_groups, pipeline_depth, **settings), family_of=lambda task: "ab"[task % 2])


def ready(version=0, tokens=10, right=1.0, **changes):
    return GroupSummary(ending="ready", versions={version: tokens}, right=right, scored=2, facts={"n": 1}, **changes)


def dropped(ending="all_wrong", **changes):
    return GroupSummary(ending=ending, versions={0: 10}, scored=2, facts={"n": 1}, **changes)


FAILED = GroupSummary(ending=None, reason="the engine broke")


async def admit(buffer, worker=0, version=0, places=8):
    """Permits that are there at once."""
    return await buffer.admit(worker, version, places, patience_s=0)


async def now(call):
    """The call, after it has gone as far as it can."""
    task = asyncio.ensure_future(call)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def fill(buffer, summary=None, **admission):
    permits = await admit(buffer, **admission)
    for permit in permits:
        buffer.complete(permit.lease, permit.group_id.encode(), summary or ready())
    return permits


async def train(buffer, step, **changes):
    batch = await asyncio.wait_for(buffer.next_batch(step), 1)
    buffer.mark_trained(step, step, **changes)
    return batch


async def test_batch_holds_the_oldest_weights_and_then_the_first_drawn():
    buffer = make_buffer()
    permits = await admit(buffer)
    assert [permit.task for permit in permits] == [0, 1, 2, 3]
    for permit, version in zip(reversed(permits), (0, 1, 0, 1), strict=True):
        buffer.complete(permit.lease, permit.group_id.encode(), ready(version))
    batch = await train(buffer, 1)
    assert batch.refs == (b"g000001", b"g000003")
    assert batch.facts == {"n": 4}
    assert [row.state for row in batch.rows] == [State.IN_BATCH] * 2
    assert (await train(buffer, 2)).refs == (b"g000000", b"g000002")
    assert buffer.counts.trained == 4


async def test_a_group_without_signal_frees_its_place_and_is_reported_once():
    buffer = make_buffer()
    first, *others = await admit(buffer)
    waiting = await now(buffer.admit(1, 0, 8))
    assert not waiting.done()
    assert not buffer.complete(first.lease, b"dropped", dropped())
    assert [permit.task for permit in await waiting] == [4]
    for permit in others:
        assert buffer.complete(permit.lease, b"kept", ready())
    batch = await train(buffer, 1)
    assert batch.untrained == ((State.ALL_WRONG, "", b"dropped"),)
    assert (batch.rows[0].id, batch.rows[0].state) == ("g000000", State.ALL_WRONG)
    assert buffer.counts.all_wrong == 1


async def test_workers_get_equal_shares_and_old_weights_get_nothing():
    buffer = make_buffer(batch_groups=4)
    calls = [await now(buffer.admit(one, -1, 99)) for one in range(4)]
    assert not any(call.done() for call in calls)
    for worker in range(4):
        buffer.prove(worker, 0)
    shares = [len(await call) for call in calls]
    assert sum(shares) == 8
    assert await admit(buffer, worker=7, version=-1) == ()


@pytest.mark.parametrize(
    ("summary", "tries", "state"),
    [(FAILED, 2, "failed"), (dropped("unscored", reason="6 of 8 took too long"), 1, "unscored")],
)
async def test_failed_group_is_tried_again_and_one_with_few_scores_is_not(summary, tries, state):
    buffer = make_buffer(batch_groups=1, pipeline_depth=0, max_tries=2)
    for num_tries in range(1, tries + 1):
        (permit,) = await admit(buffer)
        assert (permit.ordinal, permit.num_tries) == (0, num_tries)
        assert not buffer.complete(permit.lease, b"", summary)
    assert [one.ordinal for one in await admit(buffer)] == [1]
    totals = buffer.totals()
    assert getattr(totals.counts, state) == 1
    assert totals.reasons == {summary.reason: 1}


async def test_solve_rates_are_those_of_scored_trajectories():
    buffer = make_buffer(batch_groups=3)
    for permit, right in zip(await admit(buffer), (1.0, 8.0, 2.0), strict=False):
        facts = {"trajectories": 9, "right": right, "scored": 8, "unscored": 1}
        summary = GroupSummary(ending="ready", versions={0: 1}, right=right, scored=8, facts=facts)
        buffer.complete(permit.lease, b"", summary)
    batch = await train(buffer, 1)
    assert batch.facts == {"trajectories": 27, "right": 11.0, "scored": 24, "unscored": 3}
    metrics = rollout_metrics(batch.facts)
    assert (metrics["rollout/solve_rate"], metrics["rollout/unscored_share"]) == (11 / 24, 1 / 9)
    assert batch.solved == {"a": 3 / 16, "b": 8 / 8}


async def test_synchronous_round_of_a_lost_worker_is_played_again_as_a_whole():
    buffer = make_buffer(batch_groups=3, pipeline_depth=0)
    first = await admit(buffer)
    buffer.complete(first[0].lease, b"", ready())
    buffer.complete(first[1].lease, b"", dropped())
    buffer.release(0, "its worker was lost")
    again = await admit(buffer, worker=1)
    assert [(one.ordinal, one.task, one.num_tries) for one in again] == [(n, n, 1) for n in range(3)]
    for permit in again:
        buffer.complete(permit.lease, b"", ready())
    assert (await train(buffer, 1)).facts == {"n": 3}
    assert buffer.counts.drawn == 3


async def test_synchronous_batch_waits_for_the_end_of_the_round():
    buffer = make_buffer(batch_groups=1, pipeline_depth=0)
    (permit,) = await admit(buffer)
    batch = await now(buffer.next_batch(1))
    buffer.complete(permit.lease, b"x", ready())
    assert (await batch).refs == (b"x",)
    assert await admit(buffer) == ()
    buffer.mark_trained(1, 1)
    assert len(await admit(buffer, version=1)) == 1


async def test_stale_group_expires_and_its_task_is_drawn_again_until_its_attempts_are_used_up():
    buffer = make_buffer(batch_groups=1, pipeline_depth=3, max_staleness=1, max_tries=2)
    permits = await admit(buffer)
    for permit in permits[:3]:
        buffer.complete(permit.lease, b"", ready(version=0))
    for step in (1, 2):
        await train(buffer, step)
    assert buffer.counts.expired == 1
    again = await admit(buffer, version=2)
    assert (again[0].task, again[0].num_tries) == (2, 2)
    buffer.complete(again[0].lease, b"", ready(version=0))
    assert buffer.counts.ready == 1


@pytest.mark.parametrize("depth", [0, 1])
async def test_signal_that_is_rare_makes_small_batches_and_none_ends_the_run(depth):
    buffer = make_buffer(pipeline_depth=depth, max_empty_batches=7)
    batch = await now(buffer.next_batch(1))
    endings = iter([*[dropped()] * 5, ready(), *[dropped()] * 2])
    while not batch.done():
        for permit in await admit(buffer, places=2):
            buffer.complete(permit.lease, b"", next(endings))
        await asyncio.sleep(0)
    assert next(endings, None) is None
    assert len((await batch).refs) == 1
    assert (await batch).warning
    buffer.mark_trained(1, 1)
    for _ in range(5):
        await fill(buffer, dropped(), version=1, places=2)
    batch = await now(buffer.next_batch(2))
    assert not batch.done()
    await fill(buffer, dropped(), version=1, places=2)
    with pytest.raises(NoSignalError, match=r"[ab] \d+%.*max_empty_batches"):
        await batch


@pytest.mark.parametrize("depth", [0, 1])
async def test_restored_buffer_draws_what_an_undisturbed_one_draws(depth):
    async def play(buffer, steps):
        drawn = []
        for step in steps:
            while buffer.counts.ready < 2:
                for permit in await admit(buffer, version=step - 1):
                    drawn.append((permit.ordinal, permit.task))
                    right = permit.ordinal % 3 / 2
                    summary = ready(step - 1, right=right) if right else dropped()
                    buffer.complete(permit.lease, b"", summary)
            await train(buffer, step)
        return drawn

    whole, first, second = (make_buffer(pipeline_depth=depth) for _ in range(3))
    undisturbed = await play(whole, range(1, 7))
    before = await play(first, range(1, 4))
    data = msgspec.json.encode(first.snapshot)
    second.restore(msgspec.json.decode(data, type=Snapshot), step=3, policy_version=3)
    after = await play(second, range(4, 7))
    if depth == 0:
        assert before + after == undisturbed
        assert second.snapshot == whole.snapshot
    else:
        assert {task for _, task in before + after} >= set(range(max(task for _, task in before)))
        assert second.counts.balanced


class AnyOrder(RuleBasedStateMachine):
    """The real buffer under any order of events, without any time passing."""

    @initialize(
        depth=st.integers(0, 3),
        batch_groups=st.integers(1, 6),
        num_workers=st.sampled_from([1, 2, 5, 40, 1000]),
        max_staleness=st.integers(0, 3),
    )
    def start(self, depth, batch_groups, num_workers, max_staleness):
        self.loop = asyncio.new_event_loop()
        bounds = {"max_staleness": max_staleness, "max_tries": 3, "max_empty_batches": 1000}
        self.buffer = self.loop.run_until_complete(self.make(batch_groups, depth, **bounds))
        self.config = make_config(batch_groups, depth, **bounds)
        self.num_workers = num_workers
        self.step, self.version = 0, 0
        self.proven = dict.fromkeys(range(num_workers), 0)
        self.calls = {}
        self.open = {}
        self.trained = []
        self.snapshots = {0: (self.buffer.snapshot, ())}

    async def make(self, *args, **bounds):
        return make_buffer(*args, **bounds)

    def settle(self):
        """Let every call go as far as it can, and collect what was admitted."""
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(asyncio.sleep(0))
        for worker, call in list(self.calls.items()):
            if call.done():
                del self.calls[worker]
                for permit in call.result() or ():
                    assert permit.lease not in self.open
                    assert self.proven[worker] >= self.version - self.config.pipeline_depth
                    self.open[permit.lease] = (worker, permit, self.proven[worker])

    @rule(first=st.integers(0, 999), count=st.sampled_from([1, 3, 1000]), places=st.integers(1, 4))
    def ask(self, first, count, places):
        for worker in range(first % self.num_workers, min(self.num_workers, first % self.num_workers + count)):
            if worker in self.calls:
                continue
            self.calls[worker] = self.loop.create_task(self.buffer.admit(worker, self.proven[worker], places))
        self.settle()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ending=st.sampled_from(["ready", "ready", "all_right", "overlong", "unscored", None]))
    def finish(self, data, ending):
        lease = data.draw(st.sampled_from(sorted(self.open)))
        worker, permit, version = self.open.pop(lease)
        versions = {version: 8, self.proven[worker]: 2}
        summary = GroupSummary(ending=ending, versions=versions, right=1.0, scored=2 if ending else 0)
        self.buffer.complete(lease, permit.group_id.encode(), summary)
        # A lease that is no longer open changes nothing.
        assert not self.buffer.complete(lease, b"", summary)
        self.settle()

    @rule(worker=st.integers(0, 999))
    def lose_worker(self, worker):
        worker %= self.num_workers
        lost = [lease for lease, (owner, *_) in self.open.items() if owner == worker]
        assert self.buffer.release(worker, "lost") == len(lost)
        for lease in lost:
            del self.open[lease]
        self.settle()
        self.calls.pop(worker, None)

    @rule(worker=st.integers(0, 999))
    def prove(self, worker):
        for one in range(worker % self.num_workers, self.num_workers):
            if one in self.buffer.proven:
                self.proven[one] = self.version
                self.buffer.prove(one, self.version)
        self.settle()

    @rule(refused=st.booleans(), checkpoint=st.booleans())
    def train(self, refused, checkpoint):
        call = self.loop.create_task(self.buffer.next_batch(self.step + 1))
        self.settle()
        if not call.done():
            call.cancel()
            with suppress(asyncio.CancelledError):
                self.loop.run_until_complete(call)
            return
        batch = call.result()
        assert 1 <= len(batch.refs) <= self.config.batch_groups
        oldest = max((age for age in batch.version_ages.values()), default=0)
        assert oldest <= self.config.max_staleness + self.step_backs
        self.trained.extend(batch.refs)
        assert len(set(self.trained)) == len(self.trained)
        self.step += 1
        self.version += 1
        self.buffer.mark_trained(self.step, self.version, refused="no" if refused else None)
        if checkpoint:
            self.snapshots[self.step] = (self.buffer.snapshot, tuple(self.trained))
        self.settle()

    step_backs = 0

    @rule()
    def cut_off(self):
        """Continue from the newest checkpoint, in a new process or with a new learner."""
        step = max(self.snapshots)
        snapshot, trained = self.snapshots[step]
        self.step_backs += self.step - step
        self.step, self.trained = step, list(trained)
        self.version += 1
        self.open.clear()
        snapshot = msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot)
        self.buffer.restore(snapshot, step=step, policy_version=self.version)
        self.settle()

    @invariant()
    def counts_add_up(self):
        if not hasattr(self, "buffer"):
            return
        counts = self.buffer.totals().counts
        assert counts.balanced
        assert counts.running == len(self.open)
        capacity = (self.config.pipeline_depth + 1) * self.config.batch_groups
        assert counts.live - counts.queued <= capacity
        assert counts.trained + counts.refused == len(self.trained)

    def teardown(self):
        if hasattr(self, "loop"):
            self.buffer.close()
            self.settle()
            self.loop.close()


AnyOrder.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase
