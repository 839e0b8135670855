"""The PRM's actor as a plain object, around a model that is none."""

import asyncio
import threading

import psutil
import pytest

from actors import prm as prm_module
from configs.reward import PrmConfig
from envs.kernel import return_memory
from envs.types import Task
from reward.judging import PrmError
from reward.prm.step_text import step_texts
from rollout.engines.engine import Pulse
from rollout.types import Group
from tests.changed import replace
from tests.reward.test_step_text import decided, make_trajectory


class Model:
    """Scores a step by its digest. `hold()` keeps calls waiting until `release()`; they raise `errors` in turn."""

    def __init__(self, *_, **__):
        self.digest, self.calls, self.errors = "", [], []
        self.entered, self._released = threading.Event(), threading.Event()
        self._released.set()
        self.hold, self.release = self._released.clear, self._released.set

    def load(self, folder):
        self.digest = (folder / "digest").read_text()

    def score(self, steps):
        self.calls.append([step.digest for step in steps])
        self.entered.set()
        assert self._released.wait(timeout=10)
        if self.errors and (error := self.errors.pop(0)):
            raise error
        return [score_of(step) for step in steps]


def score_of(step):
    return None if "too long" in step.text else int(step.digest[:4], 16) / 0xFFFF


def make_group(name, *, num_turns=(2, 1)):
    task = Task(id=name, dataset="lookup", question=name, answer="42")
    trajectories = [
        make_trajectory(
            *(decided("think", f"{index}.{step}", "ok") for step in range(length)), task=task, id=f"{name}/{index}"
        )
        for index, length in enumerate(num_turns)
    ]
    return Group(id=name, trajectories=tuple(trajectories))


def expected(group):
    return tuple(tuple(map(score_of, step_texts(trajectory))) for trajectory in group.trajectories)


@pytest.fixture
def model(monkeypatch):
    model = Model()
    monkeypatch.setattr(prm_module, "ProcessRewardModel", lambda *_, **__: model)
    return model


@pytest.fixture
def actor(tmp_path, model):
    """With weights of the digest aaa."""
    (tmp_path / "prm").mkdir()
    (tmp_path / "prm" / "digest").write_text("a" * 64)
    return prm_module.Prm(PrmConfig(), tmp_path / "base", 0, tmp_path / "prm")


async def start_held(model, actor, first, *others):
    """Start calls of which the first has entered the model and waits there."""
    model.hold()
    tasks = [asyncio.create_task(actor.score_group(first))]
    assert await asyncio.to_thread(model.entered.wait, 10)
    tasks += [asyncio.create_task(actor.score_group(group)) for group in others]
    for _ in range(10):
        await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("num_turns", [(2, 0, 3), (1,)])
@pytest.mark.parametrize("digest", [None, "a" * 64])
async def test_group_gets_one_score_per_planner_turn_and_the_digest_of_the_weights(actor, num_turns, digest):
    for name in ("a", "too long"):
        group = make_group(name, num_turns=num_turns)
        scores = await actor.score_group(group, digest)
        assert (scores.raw, scores.prm_digest) == (expected(group), "a" * 64)


async def test_prm_that_was_started_again_without_its_weights_scores_nothing(actor, model):
    model.digest = ""
    with pytest.raises(PrmError, match=r"untrained.* aaaaaaaaaaaa: .*/prm'"):
        await actor.score_group(make_group("a"), "a" * 64)
    assert model.calls == []


async def test_groups_are_scored_one_by_one_whatever_else_waits(actor, model):
    groups = [make_group(name) for name in "abc"]
    tasks = await start_held(model, actor, *groups)
    assert await actor.heartbeat() == Pulse(done=0, num_open=9)
    model.release()
    assert [scores.raw for scores in await asyncio.gather(*tasks)] == list(map(expected, groups))
    assert [len(call) for call in model.calls] == [3, 3, 3]
    assert await actor.heartbeat() == Pulse(done=9, num_open=0)


async def test_many_steps_are_scored_in_pieces_so_that_progress_is_visible(actor, model, monkeypatch):
    pulses, score = [], model.score

    def watched(steps):
        pulses.append(asyncio.run(actor.heartbeat()))
        return score(steps)

    monkeypatch.setattr(model, "score", watched)
    group = make_group("a", num_turns=(100, 50))
    assert (await actor.score_group(group)).raw == expected(group)
    assert [len(call) for call in model.calls] == [64, 64, 22]
    assert pulses == [Pulse(done=done, num_open=150) for done in (0, 64, 128)]


async def test_steps_that_attempts_share_are_scored_once(actor, model):
    one, *others = make_group("a", num_turns=(3, 1)).trajectories
    group = Group(id="a", trajectories=(one, replace(one, turns=one.turns[:2]), one, *others))
    assert (await actor.score_group(group)).raw == expected(group)
    assert [len(call) for call in model.calls] == [4]


async def test_an_error_or_a_cancelled_call_does_not_affect_others(actor, model):
    model.errors = [None, PrmError("broken")]
    tasks = await start_held(model, actor, *map(make_group, "abcd"))
    tasks[2].cancel()
    model.release()
    first, broken, cancelled, other = await asyncio.gather(*tasks, return_exceptions=True)
    assert (first.raw, other.raw) == (expected(make_group("a")), expected(make_group("d")))
    assert isinstance(broken, PrmError)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert (await actor.heartbeat()).num_open == 0


def test_freed_memory_is_returned():
    blocks = [b"x" * 60_000 for _ in range(2000)]
    kept, process = blocks[::100], psutil.Process()
    del blocks
    before = process.memory_info().rss
    return_memory()
    assert before - process.memory_info().rss > 60e6
    assert len(kept) == 20
