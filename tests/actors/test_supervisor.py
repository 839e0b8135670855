"""The supervisor's decisions, with a Ray that does what a test says."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import ray
from fake_ray import FakeActor, FakeLauncher, FakeRay, Ref

from actors import heartbeat, learner
from actors import supervisor as module
from actors.cluster import CutOffError, LearnerLostError
from actors.launch import Cluster
from actors.supervisor import MAX_RESTARTS, Supervisor, WantedWorkers
from configs.errors import UserError
from configs.loading import load_run_config
from configs.plugins import OwnCodeError
from rollout.engines.engine import Pulse
from rollout.lifecycle import GroupCounts, Totals

LIMITS = ("cluster.answer_s=60",)


class Stage:
    """A supervisor whose thread does not run: `look` lets time pass."""

    def __init__(self, folder, *overrides, nodes=("n0", "n0"), ranks=1, has_base=False):
        self.launcher, self.said = FakeLauncher(), []
        self.sampling, self.prm, self.base = FakeActor("sampling"), FakeActor("PRM"), FakeActor("base")
        self.ranks = tuple(FakeActor(f"rank {rank}") for rank in range(ranks))
        self.first = {index: (FakeActor(f"worker {index}"), node) for index, node in enumerate(nodes)}
        parts = {"learner": self.ranks, "workers": self.first, "prm": self.prm, "base": self.base if has_base else None}
        self.supervisor = Supervisor(
            load_run_config(None, [*LIMITS, f"rollout.num_workers={len(nodes)}", *overrides]),
            folder,
            self.launcher,
            Cluster(sampling=self.sampling, **parts),
            note=self.said.append,
            waiting=lambda what: nullcontext(),
        )
        self.look()

    def look(self, tick=1.0, times=1):
        for _ in range(times):
            self.supervisor._look(tick)

    def worker(self, index):
        return self.supervisor._workers[index].actor


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    fake = FakeRay()
    for one in (module, heartbeat, learner):
        monkeypatch.setattr(one, "ray", fake)
    monkeypatch.setattr(module, "GRACE_S", -1.0)
    return fake


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def test_parts_that_answer_are_left_alone(stage):
    stage.look(30.0, times=100)
    assert (stage.said, stage.supervisor.num_restarts, stage.launcher.started) == ([], 0, [])
    stage.supervisor.check()


def test_console_names_the_groups_of_a_step_while_the_workers_roll_out(stage):
    totals = Ref()
    totals.resolve(Totals(counts=GroupCounts(ready=1, all_wrong=96, all_right=1), facts={}, reasons={}))
    stage.sampling.totals = SimpleNamespace(remote=lambda: totals)
    assert stage.supervisor.situation() == ""
    stage.supervisor._rolling_out = True
    said = stage.supervisor.situation()
    assert "1 ready" in said
    assert "97 " in said


def test_dead_worker_is_replaced_and_its_groups_are_released(stage):
    stage.worker(1).die()
    stage.look(times=2)
    assert [args[0] for name, args, _ in stage.sampling.calls if name == "release"] == [1]
    assert [one.name for one in stage.launcher.started] == ["worker 1"]
    assert set(stage.supervisor.workers) == {0, 1}
    assert stage.supervisor.num_restarts == 1
    assert "rollout worker 1 was lost" in stage.said[0]


def test_worker_that_cannot_prove_its_weights_is_replaced_with_that_reason(stage):
    (lost,) = stage.worker(0).named("until_lost")
    lost.fail(ValueError("the engine's memory holds other weights"))
    stage.look()
    assert "the engine's memory holds other weights" in stage.said[0]
    assert stage.first[0][0].is_killed


def test_worker_that_hangs_or_makes_no_progress_on_open_work_is_killed_after_its_limit(stage):
    stage.worker(0).is_hung, stage.worker(1).pulse = True, Pulse(done=7, num_open=1)
    stage.look(1.0, times=20 + 58)
    assert not stage.first[0][0].is_killed
    assert "rollout worker 0 has not answered for 5" in stage.supervisor.situation()
    stage.look(1.0, times=25)
    assert stage.first[0][0].is_killed
    assert stage.first[1][0].is_killed


def test_worker_that_does_not_start_is_killed_after_the_limit_for_starts(stage):
    stage.worker(0).die()
    stage.look()
    (second,) = stage.launcher.started
    second.is_hung = True
    second.calls.clear()
    stage.look(5.0, times=143)
    assert not second.is_killed
    stage.look(5.0, times=3)
    assert second.is_killed


def test_limit_grows_with_what_was_measured(stage):
    slow = stage.worker(0)
    for _ in range(3):
        slow.is_hung = True
        stage.look(20.0)
        stage.look(10.0)
        slow.named("heartbeat")[-1].resolve(Pulse())
        slow.is_hung = False
        stage.look(0.0)
    slow.is_hung = True
    stage.look(20.0, times=9)
    assert not slow.is_killed
    stage.look(60.0, times=8)
    assert slow.is_killed


def test_workers_of_a_lost_node_are_one_loss(tmp_path, fake):
    stage = Stage(tmp_path, nodes=("n0", *["n1"] * (MAX_RESTARTS + 3)))
    for worker, node in stage.first.values():
        if node == "n1":
            worker.die()
    stage.look(times=2)
    stage.supervisor.check()
    assert len(stage.said) == 1
    assert "node n1" in stage.said[0]
    assert stage.supervisor.num_restarts == MAX_RESTARTS + 3
    assert len(stage.supervisor.workers) == MAX_RESTARTS + 4


def test_part_that_is_lost_again_and_again_within_one_train_step_ends_the_run(stage):
    for step in range(3):
        stage.supervisor.progressed()
        for _ in range(MAX_RESTARTS + (step == 2)):
            stage.supervisor.check()
            stage.worker(0).die()
            stage.look()
    with pytest.raises(CutOffError):
        stage.supervisor.check()


def test_failing_custom_code_of_a_worker_ends_the_run_at_once(stage):
    error = ray.exceptions.RayTaskError("run", "", OwnCodeError("reward.credit.turn_scorer failed"))
    stage.worker(0).die(error.as_instanceof_cause())
    with pytest.raises(OwnCodeError, match=r"^reward\.credit\.turn_scorer failed$"):
        stage.look()


@pytest.mark.parametrize(("name", "hint"), [("sampling", "sampling"), ("base", "card.share_base")])
def test_lost_sampling_and_base_weights_end_the_run(tmp_path, name, hint):
    stage = Stage(tmp_path, has_base=True)
    getattr(stage, name).die()
    with pytest.raises(CutOffError, match=hint):
        stage.look()


@pytest.mark.parametrize("fault", ["dead", "hung"])
def test_prm_is_replaced_and_the_workers_get_the_new_one(tmp_path, fault):
    stage = Stage(tmp_path, "reward.credit=outcome_guided", "reward.credit.prm_path=prm")
    if fault == "dead":
        stage.prm.die()
    stage.prm.is_hung = True
    stage.look(20.0)
    stage.look(5.0, times=74)
    (prm,) = stage.launcher.prms
    assert stage.prm.is_killed
    assert stage.supervisor.prm is prm
    assert [args for name, args, _ in stage.worker(1).calls if name == "use_prm"] == [(prm,)]


def test_run_continues_without_a_worker_that_has_no_room(stage, monkeypatch):
    monkeypatch.setattr(module, "ROOM_WAIT_S", -1.0)
    stage.launcher.room.clear()
    stage.worker(0).die()
    stage.look(times=3)
    assert set(stage.supervisor.workers) == {1}
    assert sum("without rollout worker 0" in line for line in stage.said) == 1
    stage.launcher.room.add(0)
    stage.look(times=2)
    assert set(stage.supervisor.workers) == {0, 1}
    assert stage.said[-1] == "rollout worker 0 joined"


def test_run_ends_where_no_worker_has_room(tmp_path):
    stage = Stage(tmp_path, "cluster.patience_s=0.000001", nodes=("n0",))
    stage.launcher.room.clear()
    stage.worker(0).die()
    with pytest.raises(CutOffError):
        stage.look(times=3)


# --- the number of workers -----------------------------------------------------------------------


def test_workers_join_and_are_drained_and_then_ended_as_the_file_says(tmp_path):
    stage, path = Stage(tmp_path, nodes=("n0",)), tmp_path / "workers"
    stage.supervisor._rolling_out = True
    path.write_text("3")
    stage.look(times=2)
    assert set(stage.supervisor.workers) == {0, 1, 2}
    assert all(one.named("run") for one in stage.launcher.started)
    path.write_text("2")
    stage.look()
    part = stage.supervisor._workers[2]
    assert part.actor.named("drain")
    part.run.resolve()
    stage.look()
    assert set(stage.supervisor.workers) == {0, 1}
    assert (stage.launcher.freed, stage.supervisor.num_restarts) == ([2], 0)


IN_A_FOLDER = ("agent.memory.type=folder", "agent.memory.path=m")


def test_workers_file_rules_until_it_is_gone(tmp_path):
    path, said = tmp_path / "workers", []
    wanted = WantedWorkers(load_run_config(None, ["rollout.num_workers=2"]), path, said.append)
    assert wanted.read() == 2
    for text in ("5\n", ""):
        path.write_text(text)
        assert wanted.read() == 5
    path.unlink()
    assert (wanted.read(), said) == (2, [])


@pytest.mark.parametrize(
    ("text", "overrides"), [*((text, ()) for text in ("three", "0", "-1", "2.5", "\x00")), ("2", IN_A_FOLDER)]
)
def test_workers_file_without_an_allowed_number_changes_nothing_and_is_reported_once(tmp_path, text, overrides):
    path, said = tmp_path / "workers", []
    wanted = WantedWorkers(load_run_config(None, ["rollout.num_workers=1", *overrides]), path, said.append)
    path.write_text(text)
    assert [wanted.read() for _ in range(3)] == [1] * 3
    assert len(said) == 1


# --- the learner ---------------------------------------------------------------------------------


def answering(stage, rank, *, value=None, error=None):
    """Let the next call of a rank return or fail at once."""
    actor = stage.ranks[rank]
    call = actor._call

    def answered(method, args):
        ref = call(method, args)
        ref.fail(error) if error else ref.resolve(value)
        return ref

    actor._call = answered


def test_call_of_the_learner_returns_what_the_first_rank_does(tmp_path):
    stage = Stage(tmp_path, ranks=2)
    answering(stage, 0, value="first")
    answering(stage, 1, value="second")
    assert stage.supervisor.learn("train_step", "batch") == "first"
    assert [args for _, args, _ in stage.ranks[1].calls] == [("batch",)]


@pytest.mark.parametrize(
    ("rank", "error", "raised"),
    [(1, ray.exceptions.ActorDiedError(), LearnerLostError), (0, ValueError("a bad batch"), ValueError)],
)
def test_death_or_error_of_one_rank_ends_the_others_that_wait_for_it(tmp_path, rank, error, raised):
    stage = Stage(tmp_path, ranks=2)
    answering(stage, rank, error=error)
    with pytest.raises(raised):
        stage.supervisor.learn("train_step")
    assert stage.ranks[1 - rank].is_killed


def test_learner_that_exceeds_its_limit_is_killed(stage, monkeypatch):
    clock = iter(range(0, 100_000, 5))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(LearnerLostError, match="train_step took"):
        stage.supervisor.learn("train_step")
    assert stage.ranks[0].is_killed


def test_learner_is_not_blamed_for_a_filter_that_is_gone(stage):
    error = ray.exceptions.RayTaskError("publish", "", ray.exceptions.ActorDiedError()).as_instanceof_cause()
    answering(stage, 0, error=error)
    with pytest.raises(ray.exceptions.ActorDiedError):
        stage.supervisor.learn("publish")


def test_learner_that_dies_while_it_starts_is_started_again(stage):
    stage.launcher.learner_errors = [LearnerLostError("again")]
    stage.supervisor.restart_learner(LearnerLostError("it died"))
    assert stage.supervisor.num_restarts == 2
    stage.launcher.learner_errors = [LearnerLostError("again") for _ in range(10)]
    with pytest.raises(CutOffError):
        stage.supervisor.restart_learner(LearnerLostError("it died"))


# --- phases --------------------------------------------------------------------------------------


def test_workers_roll_out_in_the_phase_those_that_join_too_and_have_stopped_at_its_end(stage):
    with stage.supervisor.rolling_out("digest"):
        stage.worker(0).die()
        stage.look()
        runs = [ref for index in (0, 1) for ref in stage.worker(index).named("run")]
        assert len(runs) == 2
        for ref in runs:
            ref.resolve()
        stage.supervisor._end_stopped_workers()
    assert stage.sampling.named("close")


def test_waiting_driver_gets_what_ends_the_run(stage):
    stage.supervisor._failure = UserError("lost")
    with pytest.raises(UserError):
        stage.supervisor.wait(FakeActor().next_batch.remote(), "the next batch")
