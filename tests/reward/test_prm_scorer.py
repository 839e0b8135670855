import asyncio
import threading

from actors.prm import PrmScorer
from envs.types import Task
from reward.judging import PrmError
from reward.prm.step_text import step_texts
from rollout.engines.engine import Pulse
from rollout.types import Group
from tests.reward.test_step_text import decided, make_trajectory


class FakeModel:
    """A model that scores a step by its digest. `hold()` keeps calls waiting until `release()`; the next calls raise
    `errors` in turn."""

    digest = "fake-weights"

    def __init__(self, errors=()):
        self.calls = []
        self.errors = list(errors)
        self.entered, self._released = threading.Event(), threading.Event()
        self._released.set()
        self.hold, self.release = self._released.clear, self._released.set

    def score(self, steps):
        self.calls.append([step.digest for step in steps])
        self.entered.set()
        assert self._released.wait(timeout=10)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
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


async def start_held(model, scorer, first, *others):
    """Start calls of which the first has entered the model and waits there."""
    model.hold()
    tasks = [asyncio.create_task(scorer.score_group(first))]
    assert await asyncio.to_thread(model.entered.wait, 10)
    tasks += [asyncio.create_task(scorer.score_group(group)) for group in others]
    for _ in range(10):
        await asyncio.sleep(0)
    return tasks


async def test_group_gets_one_score_per_planner_turn_and_the_digest_of_the_weights():
    group = make_group("a", num_turns=(2, 0, 3))
    scores = await PrmScorer(FakeModel()).score_group(group)
    assert scores.raw == expected(group)
    assert [len(row) for row in scores.raw] == [2, 0, 3]
    assert scores.prm_digest == "fake-weights"
    assert (await PrmScorer(FakeModel()).score_group(make_group("too long", num_turns=(1,)))).raw == ((None,),)


async def test_groups_are_scored_one_by_one_whatever_else_waits():
    model = FakeModel()
    scorer, groups = PrmScorer(model), [make_group(name) for name in "abc"]
    tasks = await start_held(model, scorer, *groups)
    assert scorer.pulse == Pulse(done=0, num_open=9)
    model.release()
    assert [scores.raw for scores in await asyncio.gather(*tasks)] == list(map(expected, groups))
    assert [len(call) for call in model.calls] == [3, 3, 3]
    assert scorer.pulse == Pulse(done=9, num_open=0)


async def test_many_steps_are_scored_in_pieces_so_that_progress_is_visible():
    pulses = []

    class Watched(FakeModel):
        def score(self, steps):
            pulses.append(scorer.pulse)
            return super().score(steps)

    model = Watched()
    scorer = PrmScorer(model)
    group = make_group("a", num_turns=(100, 50))
    assert (await scorer.score_group(group)).raw == expected(group)
    assert [len(call) for call in model.calls] == [64, 64, 22]
    assert pulses == [Pulse(done=0, num_open=150), Pulse(done=64, num_open=150), Pulse(done=128, num_open=150)]
    assert scorer.pulse == Pulse(done=150, num_open=0)


async def test_an_error_or_a_cancelled_call_does_not_affect_others():
    model = FakeModel(errors=[None, PrmError("broken")])
    scorer = PrmScorer(model)
    tasks = await start_held(model, scorer, *map(make_group, "abcd"))
    tasks[2].cancel()
    model.release()
    first, broken, cancelled, other = await asyncio.gather(*tasks, return_exceptions=True)
    assert (first.raw, other.raw) == (expected(make_group("a")), expected(make_group("d")))
    assert isinstance(broken, PrmError)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert scorer.pulse.num_open == 0
