import re
from types import SimpleNamespace

import pytest
import ray
from ray_jobs.run.deaths import MAX_DEATHS, CrashLoopError
from ray_jobs.run.watch import BEAT_EVERY_S, LATE_AFTER_S, LIVES_EVERY_S, TIMES_MEDIAN, Patience, Watch

from configs.cluster import LivenessConfig
from ray_jobs.run import watch as watch_module
from rollout.engines.engine import Pulse

SETTINGS = LivenessConfig(answer_s=60.0, work_s=600.0, start_s=1000.0)


class Cluster:
    """Answers in the place of Ray. `answers`: what an actor says when it is asked for its heartbeat; one that has none
    is silent."""

    def __init__(self):
        self.answers, self.restarts, self.ended = {}, {}, []

    def actor(self, name, answer=None):
        if answer is not None:
            self.answers[name] = answer
        return SimpleNamespace(name=name, heartbeat=SimpleNamespace(remote=lambda: name))

    def wait(self, references, timeout):
        assert timeout == 0
        return [one for one in references if one in self.answers], []

    def get(self, name):
        if isinstance(self.answers[name], Exception):
            raise self.answers[name]
        return self.answers[name]

    def kill(self, actor, *, no_restart=True):
        self.ended.append((actor.name, "for good" if no_restart else "restarts"))

    def num_restarts(self, actor):
        return self.restarts.get(actor.name, 0)


@pytest.fixture
def cluster(monkeypatch):
    cluster = Cluster()
    fake = SimpleNamespace(wait=cluster.wait, get=cluster.get, exceptions=ray.exceptions)
    monkeypatch.setattr(watch_module, "ray", fake)
    monkeypatch.setattr(watch_module, "kill", cluster.kill)
    monkeypatch.setattr(watch_module, "num_restarts", cluster.num_restarts)
    return cluster


@pytest.fixture
def said():
    return []


@pytest.fixture
def watch(said):
    return Watch(SETTINGS, resume="`agentflow resume r`", note=said.append)


def follow(watch, actor, **options):
    watch.follow(actor.name, actor, **({"kind": "worker", "floor_s": SETTINGS.answer_s} | options))


def pass_by(watch, seconds, tick=1.0):
    for _ in range(round(seconds / tick)):
        watch.look(tick)


def test_who_answers_is_left_alone(watch, cluster, said):
    follow(watch, cluster.actor("rollout worker 0", Pulse()))
    pass_by(watch, 5000)
    assert (cluster.ended, said, watch.late()) == ([], [], "")


def test_who_answers_no_more_is_named_and_then_killed(watch, cluster, said):
    follow(watch, cluster.actor("rollout worker 0", Pulse()))
    pass_by(watch, 100)
    del cluster.answers["rollout worker 0"]
    assert watch.late() == ""
    pass_by(watch, LATE_AFTER_S + BEAT_EVERY_S)
    assert re.fullmatch(r"; the rollout worker 0 has not answered for \d+ s \(bound 60 s\)", watch.late())
    assert cluster.ended == []
    pass_by(watch, SETTINGS.answer_s)
    assert cluster.ended == [("rollout worker 0", "for good")]
    assert said == ["the rollout worker 0 hangs: it has not answered for 61 s (bound 60 s); it is killed"]
    assert watch.why("rollout worker 0").startswith("it hung: ")
    assert watch.why("rollout worker 0") is None


def test_who_starts_may_take_longer(watch, cluster):
    follow(watch, cluster.actor("rollout worker 0"))
    pass_by(watch, SETTINGS.start_s - 1)
    assert cluster.ended == []
    pass_by(watch, 3)
    assert cluster.ended == [("rollout worker 0", "for good")]


def test_engine_that_answers_and_computes_nothing_of_what_is_open_is_killed(watch, cluster, said):
    follow(watch, cluster.actor("rollout worker 0", Pulse(done=7, num_open=3)))
    pass_by(watch, SETTINGS.answer_s + 3 * BEAT_EVERY_S)
    assert cluster.ended == [("rollout worker 0", "for good")]
    assert "has computed nothing for" in said[0]


def test_engine_that_has_nothing_to_do_or_gets_on_is_left_alone(watch, cluster):
    follow(watch, cluster.actor("idle", Pulse(done=7)))
    follow(watch, cluster.actor("busy", Pulse()))
    for done in range(200):
        cluster.answers["busy"] = Pulse(done=done, num_open=3)
        pass_by(watch, BEAT_EVERY_S + 1)
    assert cluster.ended == []


def test_what_restarts_by_itself_is_only_ended(watch, cluster):
    follow(watch, cluster.actor("store", Pulse()), restarts=True)
    pass_by(watch, 10)
    del cluster.answers["store"]
    pass_by(watch, BEAT_EVERY_S + SETTINGS.answer_s + 1)
    assert cluster.ended == [("store", "restarts")]


@pytest.mark.parametrize(("answered", "bound_s"), [(True, SETTINGS.answer_s), (False, SETTINGS.start_s)])
def test_who_takes_no_calls_any_more_is_silent_however_often_ray_says_so(watch, cluster, said, answered, bound_s):
    follow(watch, cluster.actor("PRM", Pulse() if answered else None), restarts=True)
    pass_by(watch, BEAT_EVERY_S + 1)
    cluster.answers["PRM"] = ray.exceptions.ActorUnavailableError("failed to connect to all addresses", None)
    pass_by(watch, LATE_AFTER_S + BEAT_EVERY_S)
    assert "the PRM has not" in watch.late()
    assert cluster.ended == []
    pass_by(watch, bound_s)
    assert cluster.ended == [("PRM", "restarts")]
    assert len(said) == 1


def test_who_answers_slowly_all_the_time_gets_longer(watch, cluster):
    follow(watch, cluster.actor("rollout worker 0"))
    for _ in range(10):
        pass_by(watch, BEAT_EVERY_S + 30)
        cluster.answers["rollout worker 0"] = Pulse()
        pass_by(watch, 1)
        del cluster.answers["rollout worker 0"]
    pass_by(watch, 20 * 30)
    assert cluster.ended == []


def test_a_call_that_takes_too_long_ends_its_actor(watch, cluster, said):
    learner = cluster.actor("learner")
    with watch.call("learner", learner, "train step"):
        pass_by(watch, 30)
    with watch.call("learner", learner, "train step"):
        assert watch.late() == ""
        pass_by(watch, LATE_AFTER_S + 10)
        assert watch.late() == "; the learner's train step takes 30 s so far"
        pass_by(watch, SETTINGS.work_s - 30)
        assert cluster.ended == []
        pass_by(watch, 1)
    assert cluster.ended == [("learner", "for good")]
    assert said == ["the learner hangs: its train step has taken 601 s (bound 600 s); it is killed"]


def test_who_waits_for_a_store_that_does_not_answer_is_not_killed_for_it(watch, cluster):
    store = cluster.actor("store", Pulse())
    follow(watch, store, restarts=True, floor_s=5000.0)
    with watch.call("learner", cluster.actor("learner"), "publish"):
        pass_by(watch, 5)
    del cluster.answers["store"]
    with watch.call("learner", cluster.actor("learner"), "publish"):
        pass_by(watch, 4 * SETTINGS.work_s)
    assert cluster.ended == []


def test_the_first_call_of_a_kind_may_compile(watch, cluster):
    with watch.call("learner", cluster.actor("learner"), "train step"):
        pass_by(watch, SETTINGS.start_s)
        assert cluster.ended == []


def test_calls_that_fail_are_no_measure(watch, cluster):
    with pytest.raises(ValueError, match="refused"), watch.call("learner", cluster.actor("learner"), "train step"):
        raise ValueError("refused")
    with watch.call("learner", cluster.actor("learner"), "train step"):
        pass_by(watch, SETTINGS.start_s)
        assert cluster.ended == []


def test_death_of_what_restarts_is_told_and_counted(watch, cluster, said):
    follow(watch, cluster.actor("store", Pulse()), restarts=True)
    cluster.restarts["store"] = 1
    pass_by(watch, LIVES_EVERY_S)
    cluster.restarts["store"] = 3
    pass_by(watch, LIVES_EVERY_S)
    assert said == [
        "the store died and was started again (its process ended; see the actors' logs)",
        "the store died 2 times and was started again (its process ended; see the actors' logs)",
    ]
    assert watch.deaths.total == 3


def test_store_that_dies_again_and_again_is_not_started_any_more_and_says_why(watch, cluster):
    follow(watch, cluster.actor("store"), restarts=True)
    for num in range(1, MAX_DEATHS + 2):
        cluster.restarts["store"] = num
        pass_by(watch, LIVES_EVERY_S)
    assert cluster.ended == [("store", "for good")]
    with pytest.raises(CrashLoopError, match=r"the store died 6 times .* go on with `agentflow resume r`"):
        watch.deaths.check()
    watch.look(1.0)


def test_actor_that_died_is_asked_again_only_later(watch, cluster):
    follow(watch, cluster.actor("rollout worker 0", ray.exceptions.RayActorError()))
    pass_by(watch, 5000)
    assert cluster.ended == []
    watch.leave("rollout worker 0")
    watch.leave("rollout worker 0")


def test_time_in_which_the_watch_was_stopped_counts_for_nobody(watch, cluster, monkeypatch):
    ticks, now = [], iter([0.0, 1.0, 3601.0])
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(watch, "look", ticks.append)
    monkeypatch.setattr(watch, "_ending", SimpleNamespace(wait=lambda _: len(ticks) == 2))
    watch._run()
    assert ticks == [1.0, watch_module.LONGEST_TICK_S]


def test_cluster_that_cannot_be_asked_is_one_line_and_is_asked_again(watch, monkeypatch, caplog):
    looks = []

    def look(tick):
        looks.append(tick)
        raise ray.exceptions.RayError("the cluster\ndoes not answer")

    monkeypatch.setattr(watch, "look", look)
    monkeypatch.setattr(watch, "_ending", SimpleNamespace(wait=lambda _: len(looks) == 2))
    watch._run()
    assert [(one.getMessage(), one.exc_info) for one in caplog.records] == [
        ("the watch could not look around: the cluster", None)
    ] * 2


def test_bounds_come_from_what_was_measured_and_never_fall_below_the_floor():
    patience = Patience(floor_s=60.0, first_s=600.0)
    assert patience.bound_s == 600.0
    patience.observe(1.0)
    assert patience.bound_s == 60.0
    for _ in range(5):
        patience.observe(30.0)
    assert patience.bound_s == 30.0 * TIMES_MEDIAN
