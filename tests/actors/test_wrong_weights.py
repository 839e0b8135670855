"""Engines that sample with other weights than the learner published: each is caught, and gets no work meanwhile."""

from functools import partial

import pytest
import ray
from faults import HangingEngine, LateEngine, MutatingEngine, StaleEngine, events, worker_with
from stage import check_nothing_lost, local_ray, make_config, open_stage, versions_of

from ray_jobs.run import actors, supervisor
from rollout.store.adapters import AdapterMismatchError

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray():
        yield


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (MutatingEngine, "as version 2, published was"),
        (StaleEngine, "version 2: the engine's memory holds weights"),
    ],
)
def test_worker_with_other_weights_is_replaced_and_what_it_began_with_them_is_run_again(tmp_path, engine, reason):
    build_worker = partial(worker_with, engine, folder=tmp_path)
    with open_stage(make_config(tmp_path), build_worker=build_worker) as stage:
        facts = stage.finish(stage.reinforce())
        check_nothing_lost(stage.folder)
        said, rows = stage.said, stage.groups()
    (fault,) = events(tmp_path, "fault")
    begun = events(tmp_path, "begin")
    assert (facts["num_steps"], facts["restarts"]) == (5, 1)
    assert "the rollout worker 0 was lost and is replaced" in said
    assert reason in said
    # What it had begun with them until it was found out was thrown away and run again.
    tainted = {one["group"] for one in begun if one["pid"] == fault["pid"] and one["version"] == 2}
    assert tainted <= {row["ordinal"] for row in rows if row["attempt"] > 1}
    assert max(one["version"] for one in begun if one["pid"] != fault["pid"]) >= 2


def test_run_does_not_begin_while_an_engine_ignores_the_adapter(tmp_path):
    build_worker = partial(worker_with, StaleEngine, folder=tmp_path, from_version=0)
    with (
        pytest.raises(AdapterMismatchError, match="worker 0, version 0: the engine's memory holds"),
        open_stage(make_config(tmp_path), build_worker=build_worker),
    ):
        pass
    assert events(tmp_path, "begin") == []


def test_worker_that_never_takes_a_version_up_gets_no_work_and_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "PROOF_PATIENCE_S", 6.0)
    config = make_config(tmp_path, "rollout.num_workers=2", "num_steps=150", "pipeline_depth=1")
    with open_stage(config, build_worker=partial(worker_with, HangingEngine, folder=tmp_path)) as stage:
        facts = stage.finish(stage.reinforce())
        check_nothing_lost(stage.folder)
        said = stage.said
    (fault,) = events(tmp_path, "fault")
    begun = events(tmp_path, "begin")
    (lost,) = {one["worker"] for one in begun if one["pid"] == fault["pid"]}
    assert f"the rollout worker {lost} was lost and is replaced (it proved no new weights for 6 s)" in said
    assert facts["restarts"] == 1
    # Version 1 is the last that it took up, if it did not pass over it; the other went on, and so did its successor.
    assert max(one["version"] for one in begun if one["pid"] == fault["pid"]) <= 1
    assert max(one["version"] for one in begun if one["worker"] != lost) > 10
    assert [one for one in begun if one["worker"] == lost and one["pid"] != fault["pid"]]


def test_run_ends_with_an_error_where_an_engine_never_takes_up_its_last_version(tmp_path, monkeypatch):
    monkeypatch.setattr(actors, "SYNC_PATIENCE_S", 5.0)
    build_worker = partial(worker_with, HangingEngine, folder=tmp_path)
    with (
        open_stage(make_config(tmp_path, "num_steps=2"), build_worker=build_worker) as stage,
        pytest.raises(AdapterMismatchError, match="a rollout worker did not take up version 2 within 5 s"),
    ):
        stage.finish(stage.reinforce())


def test_engine_that_is_slow_to_take_versions_up_is_not_replaced(tmp_path):
    config = make_config(tmp_path, "rollout.num_workers=2")
    with open_stage(config, build_worker=partial(worker_with, LateEngine, folder=tmp_path)) as stage:
        facts = stage.finish(stage.reinforce())
        check_nothing_lost(stage.folder)
    assert facts["restarts"] == 0


def test_version_number_is_not_given_to_other_weights(tmp_path):
    with open_stage(make_config(tmp_path, "num_steps=2")) as stage:
        stage.finish(stage.reinforce())
        actors, versions = stage.run.actors, versions_of(stage.folder)
        ray.get(actors.learner.renumber.remote(1))
        with pytest.raises(ValueError, match="version 1 was published before; the next is 3"):
            ray.get(actors.learner.publish.remote(actors.store))
        assert actors.publish_anew() == 3
    assert versions_of(stage.folder) == [*versions, 3]
