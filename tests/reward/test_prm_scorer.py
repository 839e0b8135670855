import asyncio
import threading
from collections import Counter

import pytest

from envs.types import Task
from reward.prm.scorer import PrmScorer
from reward.prm.step_text import step_texts
from reward.types import PrmError
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
    task = Task(id=name, dataset="arith", question=name, answer="42")
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


async def test_calls_that_wait_for_the_model_are_scored_together_and_equal_steps_once():
    model = FakeModel()
    scorer, groups = PrmScorer(model), [make_group(name) for name in "abcdefaf"]
    tasks = await start_held(model, scorer, *groups)
    assert scorer.pulse == Pulse(done=0, num_open=3)
    model.release()
    scored = await asyncio.gather(*tasks)
    assert [scores.raw for scores in scored] == [expected(group) for group in groups]
    assert [len(call) for call in model.calls] == [3, 15]
    assert await scorer.score_group(groups[0]) == scored[0]
    assert (len(model.calls), scorer.pulse) == (2, Pulse(done=18, num_open=0))


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


async def test_step_without_a_score_is_cached_as_well():
    model = FakeModel()
    scorer = PrmScorer(model)
    for _ in range(2):
        assert (await scorer.score_group(make_group("too long", num_turns=(1,)))).raw == ((None,),)
    assert len(model.calls) == 1


async def test_eviction_with_many_callers_loses_no_score():
    scorer = PrmScorer(FakeModel(), max_cached=4)
    groups = [make_group(name, num_turns=(3, 2)) for name in "abcdefgh"]
    async with asyncio.timeout(10):
        scored = await asyncio.gather(*map(scorer.score_group, groups))
    assert [scores.raw for scores in scored] == list(map(expected, groups))


@pytest.mark.parametrize(("max_cached", "calls"), [(6, 4), (9, 3)])
async def test_oldest_scores_are_evicted_first_from_a_full_cache(max_cached, calls):
    model = FakeModel()
    scorer = PrmScorer(model, max_cached=max_cached)
    for name in ("a", "b", "c", "b", "a"):
        await scorer.score_group(make_group(name))
    assert len(model.calls) == calls
    assert max(Counter(digest for call in model.calls for digest in call).values()) == calls - 2


async def test_error_reaches_one_caller_and_the_steps_of_others_are_scored_again():
    model = FakeModel(errors=[None, PrmError("broken")])
    tasks = await start_held(model, PrmScorer(model), *map(make_group, "abc"))
    model.release()
    first, broken, other = await asyncio.gather(*tasks, return_exceptions=True)
    assert first.raw == expected(make_group("a"))
    assert isinstance(broken, PrmError)
    assert other.raw == expected(make_group("c"))


async def test_model_that_stays_broken_fails_every_caller():
    scorer = PrmScorer(FakeModel(errors=[PrmError("broken")] * 3))
    async with asyncio.timeout(10):
        errors = await asyncio.gather(*(scorer.score_group(make_group(name)) for name in "abc"), return_exceptions=True)
    assert [type(error) for error in errors] == [PrmError] * 3


async def test_cancelled_caller_does_not_affect_others():
    model = FakeModel()
    tasks = await start_held(model, PrmScorer(model), *map(make_group, "abc"))
    tasks[1].cancel()
    model.release()
    first, cancelled, other = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert (first.raw, other.raw) == (expected(make_group("a")), expected(make_group("c")))
