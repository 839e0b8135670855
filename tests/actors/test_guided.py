"""Groups without a right attempt are trained with guided ones, whatever happens to their worker meanwhile."""

from functools import partial

import pytest
from stage import check_law, kill, make_config, open_stage, wait_until

from configs.errors import UserError
from configs.plugins import OwnCodeError
from rollout.codec import read_trajectories
from rollout.files import read_records
from tests.faults.audit import steps_of
from tests.simulated_parts import GroupShape, SimulatedWorker

pytestmark = pytest.mark.ray
GUIDED = 'reward.credit={turn_scorer="benchmarks.scorers:random", attempts=3}'


@pytest.mark.usefixtures("cluster")
def test_rescued_groups_are_trained_once_and_do_not_count_as_solved_by_the_policy(tmp_path):
    wrong = GroupShape(shares={"all_wrong": 1.0})
    with open_stage(make_config(tmp_path, GUIDED), build_worker=partial(SimulatedWorker, shape=wrong)) as stage:
        training = stage.reinforce()
        wait_until(lambda: len(steps_of(stage.folder)) >= 2)
        kill("rollout")
        facts = stage.finish(training)
        assert check_law(stage.folder, facts)["trained"] == 10
        assert "rollout worker 0 was lost and is replaced" in stage.said
    rows = [row for row in read_records(stage.folder / "metrics.jsonl") if row.get("guided/groups")]
    assert {row["guided/rescued_share"] for row in rows} == {1.0}
    assert {row["rollout/solve_rate"] for row in rows} == {0.0}
    trained = [one for one in read_trajectories(stage.folder / "trajectories.jsonl") if one.verdict == "trained"]
    assert {one.outcome for one in trained if "/guided/" in one.id} == {1.0}
    assert sum("/guided/" in one.id for one in trained) == 10 * 3 == len(trained) - 10


class ScriptedFailure(SimulatedWorker):
    async def run_guided(self, task, group_id, guides, hints):
        guides[0].failure = OwnCodeError("reward.credit.turn_scorer cannot be loaded")
        return await super().run_guided(task, group_id, guides, hints)


@pytest.mark.usefixtures("cluster")
def test_run_whose_turn_scorer_fails_ends(tmp_path):
    build = partial(ScriptedFailure, shape=GroupShape(shares={"all_wrong": 1.0}))
    with open_stage(make_config(tmp_path, GUIDED), build_worker=build) as stage:
        training = stage.reinforce()
        with pytest.raises(UserError, match=r"reward\.credit\.turn_scorer"):
            stage.finish(training)
