import asyncio
from dataclasses import replace

import pytest

from ray_jobs.simulate.simulation import SimulationSettings, run_in_virtual_time, selection_bias, simulate
from ray_jobs.simulate.worker import (
    DrawnTask,
    LognormalTasks,
    MeasuredTasks,
    ParetoTasks,
    Processor,
    TaskStream,
    WorkerSettings,
    tokens_by_version,
)
from rollout.buffer import BufferSettings, StarvedError

HEAVY_TAILS = {
    "lognormal": LognormalTasks(median_s=30, sigma=1.2),
    "pareto": ParetoTasks(median_s=30, alpha=1.5),
}


def constant(seconds):
    return LognormalTasks(median_s=seconds, sigma=0)


class InOrder:
    """Tasks of these seconds one after the other, then all of the last."""

    def __init__(self, *seconds):
        self.seconds = list(seconds)

    def draw(self, rng):
        seconds = self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]
        return DrawnTask(seconds=seconds, fate="signal")


def make_settings(
    *, batch_groups=2, depth=1, cap=8, max_attempts=6, places=12, sync_s=0.0, load_slope=0.0, tasks=None, **changes
):
    settings = SimulationSettings(
        buffer=BufferSettings(
            batch_groups=batch_groups, pipeline_depth=depth, max_staleness=cap, max_attempts=max_attempts
        ),
        tasks=tasks or constant(10),
        worker=WorkerSettings(places=places, sync_s=sync_s, load_slope=load_slope),
        num_workers=1,
        group_size=4,
        step_s=5.0,
        num_steps=20,
    )
    return replace(settings, **changes)


# --- rates, by hand ----------------------------------------------------------------------------------


def test_a_synchronous_step_is_a_round_of_rollouts_then_training_then_the_sync():
    result = simulate(make_settings(depth=0, sync_s=2))
    assert result.wall_s == pytest.approx(20 * (10 + 5) + 19 * 2)
    assert result.trajectories_per_s == pytest.approx(20 * 2 * 4 / result.wall_s)
    assert result.learner_idle == pytest.approx((20 * 10 + 19 * 2) / result.wall_s)
    assert result.places_used == pytest.approx(20 * 2 * 10 / 12 / result.wall_s)


def test_synchronous_training_has_no_staleness():
    result = simulate(make_settings(depth=0, sync_s=2, tasks=HEAVY_TAILS["lognormal"]))
    assert (result.staleness_mean, result.staleness_max, result.masked) == (0, 0, 0)


def test_a_fast_worker_keeps_the_learner_busy_after_the_first_batch():
    result = simulate(make_settings(depth=1, tasks=constant(4)))
    assert result.wall_s == pytest.approx(4 + 20 * 5)
    assert result.learner_idle == pytest.approx(4 / result.wall_s)


def test_a_slow_worker_sets_the_pace_and_training_is_hidden():
    """Two places, a batch every 10 s; only the last train step is not hidden."""
    result = simulate(make_settings(depth=2, places=2))
    assert result.wall_s == pytest.approx(20 * 10 + 5)
    assert result.places_used == pytest.approx(1)
    assert result.backpressure == pytest.approx(0)


def test_filtered_groups_take_their_time_and_train_nothing():
    """Every second group is all wrong: two places bring one group with signal in 10 s."""
    groups = [DrawnTask(seconds=10, fate="signal"), DrawnTask(seconds=10, fate="all_wrong")]
    result = simulate(make_settings(depth=4, places=2, num_steps=200, tasks=MeasuredTasks(groups=groups)))
    assert result.trajectories_per_s == pytest.approx(4 / 10, rel=0.1)
    assert result.counts.all_wrong == pytest.approx(400, rel=0.15)


def test_groups_slow_each_other_down_by_the_slope():
    """Two groups at a time, each 1.5 times as slow."""
    result = simulate(make_settings(depth=2, places=2, load_slope=0.5))
    assert result.wall_s == pytest.approx(20 * 15 + 5)


def test_a_group_is_slowed_only_while_another_one_runs():
    """A has done 5 of 10 s when B comes; both go at half speed until A ends at 15, then B does its last 5 s alone."""

    async def play():
        loop = asyncio.get_running_loop()
        processor, ends = Processor(slope=1.0), []

        async def run(delay):
            await asyncio.sleep(delay)
            await processor.process(10)
            ends.append(loop.time())

        await asyncio.gather(run(0), run(5))
        return ends, processor.taken_s()

    ends, taken_s = run_in_virtual_time(play())
    assert ends == pytest.approx([15, 20])
    assert taken_s == pytest.approx(15 + 15)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", HEAVY_TAILS)
def test_more_workers_never_hurt_by_more_than_noise(name, seed):
    settings = make_settings(depth=2, batch_groups=4, places=3, tasks=HEAVY_TAILS[name], num_steps=60, seed=seed)
    rates = [simulate(replace(settings, num_workers=num)).trajectories_per_s for num in (1, 2, 4)]
    assert rates[1] > 0.98 * rates[0]
    assert rates[2] > 0.98 * rates[1]


# --- staleness ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_mean_staleness_is_the_depth_when_generation_is_faster_than_training(depth):
    result = simulate(make_settings(depth=depth, tasks=constant(0.1), num_steps=200))
    assert result.staleness_mean == pytest.approx(depth, rel=0.05)
    assert result.staleness_max <= depth


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_mean_staleness_is_below_the_depth_when_training_waits(depth):
    result = simulate(make_settings(depth=depth, places=2, num_steps=200))
    assert result.learner_idle > 0.4
    assert result.staleness_mean < 0.6 * depth


def test_tokens_belong_to_the_version_that_sampled_them():
    task = DrawnTask(seconds=10, fate="signal")
    switches = [(0.0, 0), (12.0, 1), (18.0, 3), (25.0, 4)]
    assert tokens_by_version(task, 10.0, 20.0, switches) == {0: 2000, 1: 6000, 3: 2000}
    assert tokens_by_version(task, 12.0, 15.0, switches) == {1: 10_000}
    assert tokens_by_version(task, 30.0, 40.0, switches) == {4: 10_000}


def test_tokens_beyond_the_cap_are_masked_and_their_group_is_trained():
    """The first task runs from 0 to 50 s. Beside it one group after the other is run and trained, 15 s each: versions
    come at 15, 30 and 45. At 50 the cap of 2 leaves out what version 0 sampled, 3 behind the newest."""
    settings = make_settings(batch_groups=1, depth=1, cap=2, places=2, tasks=InOrder(50, 10), num_steps=10)
    slow = next(group for group in simulate(settings).cohort if group.task == 0)
    assert slow.versions == {0: 15_000, 1: 15_000, 2: 15_000, 3: 5_000}
    assert slow.masked_tokens == 15_000


def test_new_weights_reach_a_running_group_after_the_sync():
    settings = make_settings(batch_groups=1, depth=1, places=2, sync_s=3, tasks=InOrder(50, 10), num_steps=10)
    slow = next(group for group in simulate(settings).cohort if group.task == 0)
    assert slow.versions[0] == 18_000


# --- groups ------------------------------------------------------------------------------------------


def test_the_ledger_balances_and_holds_what_was_trained():
    shares = {"signal": 0.5, "all_right": 0.2, "all_wrong": 0.2, "failed": 0.1}
    settings = make_settings(tasks=LognormalTasks(median_s=10, sigma=1, shares=shares), max_attempts=2)
    counts = simulate(settings).counts
    assert counts.balanced
    assert counts.trained == 20 * 2
    assert min(counts.all_right, counts.all_wrong, counts.failed) > 0


def test_one_seed_is_one_result_and_another_seed_another():
    settings = make_settings(tasks=HEAVY_TAILS["lognormal"], num_workers=2, load_slope=0.1, sync_s=1)
    assert simulate(settings) == simulate(settings)
    assert simulate(settings) != simulate(replace(settings, seed=1))


def test_settings_with_one_seed_meet_the_same_tasks():
    synchronous, ahead = (
        {
            group.task: group.drawn.seconds
            for group in simulate(make_settings(depth=depth, tasks=HEAVY_TAILS["pareto"])).cohort
        }
        for depth in (0, 4)
    )
    shared = synchronous.keys() & ahead.keys()
    assert len(shared) >= 20
    assert all(synchronous[task] == ahead[task] for task in shared)


def test_distributions_have_the_median_that_they_were_given():
    for tasks in HEAVY_TAILS.values():
        stream = TaskStream(tasks, 0)
        seconds = sorted(stream[number].seconds for number in range(4001))
        assert seconds[2000] == pytest.approx(30, rel=0.05)


def test_starvation_ends_as_in_a_real_run():
    shares = {"signal": 0.0, "all_wrong": 1.0}
    with pytest.raises(StarvedError, match="all wrong"):
        simulate(make_settings(tasks=LognormalTasks(median_s=10, sigma=0, shares=shares)))


# --- what is trained is what was drawn ---------------------------------------------------------------


def cancelled_when_stale(cohort, *, cap):
    """The same groups under another policy: one that is older than the cap when it ends is dropped."""
    first = {group.task: group for group in reversed(cohort) if group.drawn.fate == "signal"}.values()
    return selection_bias([(one.drawn, one.policy_version - min(one.versions) <= cap) for one in first])


@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("name", HEAVY_TAILS)
def test_slow_tasks_keep_their_share_where_cancelling_stale_ones_would_delete_them(name, depth):
    settings = make_settings(
        batch_groups=8, depth=depth, cap=8, places=24, sync_s=1, tasks=HEAVY_TAILS[name], step_s=20, num_steps=150
    )
    result = simulate(settings)
    assert result.bias.slow_decile_drawn == pytest.approx(0.1, abs=0.005)
    assert result.bias.slow_decile_trained == pytest.approx(result.bias.slow_decile_drawn, abs=0.01)
    trap = cancelled_when_stale(result.cohort, cap=2)
    assert trap.slow_decile_trained < 0.02
    assert trap.length_trained_over_drawn < 0.6


def test_the_cohort_is_complete_although_its_slowest_task_outlasts_the_steps():
    settings = make_settings(batch_groups=1, depth=1, places=2, tasks=InOrder(320, 10), num_steps=20)
    result = simulate(settings)
    assert result.wall_s == pytest.approx(300)
    assert result.num_open == 0
    assert result.bias.length_trained_over_drawn == pytest.approx(1)
