import asyncio
import threading
from collections import Counter

import pytest

from envs.types import Task, ToolCall, ToolResult
from reward.prm.model import PrmError
from reward.prm.scorer import PrmScorer
from reward.prm.step_text import step_texts
from rollout.engines.engine import Pulse
from rollout.types import Completion, Group, Trajectory, Turn


class FakeScorer:
    """Scores a step by its digest. `hold()` keeps model calls waiting until `release()`; `errors` are raised in turn
    by the calls to come."""

    digest = "fake-weights"

    def __init__(self, errors=()):
        self.calls = []
        self.errors = list(errors)
        self.entered = threading.Event()
        self._go = threading.Event()
        self._go.set()

    def score(self, steps):
        self.calls.append([step.digest for step in steps])
        self.entered.set()
        assert self._go.wait(timeout=10)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return [score_of(step) for step in steps]

    def hold(self):
        self._go.clear()

    def release(self):
        self._go.set()

    @property
    def times_scored(self):
        return Counter(digest for call in self.calls for digest in call)


def score_of(step):
    """None for a step that names itself too long."""
    return None if "too long" in step.text else int(step.digest[:4], 16) / 0xFFFF


def make_turn(text):
    completion = Completion(token_ids=(1,), logprobs=(0.0,), text=text, finish_reason="stop", policy_version=1)
    return Turn.of(
        role="planner",
        prompt_token_ids=(1,),
        completion=completion,
        trainable=True,
        thought=text,
        tool_call=ToolCall(name="think", arguments=text),
        tool_result=ToolResult(text="ok"),
    )


def make_group(name, *, num_turns=(2, 1)):
    task = Task(id=name, dataset="arith", question=name, answer="42")
    trajectories = [
        Trajectory(
            id=f"{name}/{index}",
            group_id=name,
            task=task,
            turns=tuple(make_turn(f"{index}.{step}") for step in range(length)),
            answer=None,
            stop_reason="answered",
        )
        for index, length in enumerate(num_turns)
    ]
    return Group(id=name, trajectories=tuple(trajectories))


def expected(group):
    return tuple(tuple(map(score_of, step_texts(trajectory))) for trajectory in group.trajectories)


async def start(scorer, *groups):
    """Tasks that have all asked by now."""
    tasks = [asyncio.create_task(scorer.score_group(group)) for group in groups]
    for _ in range(10):
        await asyncio.sleep(0)
    return tasks


async def start_held(fake, scorer, group):
    """A call whose model call has begun and cannot end before `release()`."""
    fake.hold()
    tasks = await start(scorer, group)
    assert await asyncio.to_thread(fake.entered.wait, 10)
    return tasks


async def test_group_gets_one_score_per_planner_turn_and_the_digest_of_the_weights():
    group = make_group("a", num_turns=(2, 0, 3))
    scores = await PrmScorer(FakeScorer()).score_group(group)
    assert scores.raw == expected(group)
    assert [len(row) for row in scores.raw] == [2, 0, 3]
    assert scores.prm_digest == "fake-weights"


async def test_group_without_turns_asks_no_model():
    fake = FakeScorer()
    assert (await PrmScorer(fake).score_group(make_group("a", num_turns=(0, 0)))).raw == ((), ())
    assert fake.calls == []


async def test_calls_that_wait_for_the_model_are_scored_together():
    fake = FakeScorer()
    scorer = PrmScorer(fake)
    groups = [make_group(name) for name in "abcdef"]
    tasks = await start_held(fake, scorer, groups[0])
    tasks += await start(scorer, *groups[1:])
    fake.release()
    found = await asyncio.gather(*tasks)
    assert [scores.raw for scores in found] == [expected(group) for group in groups]
    assert [len(call) for call in fake.calls] == [3, 15]


async def test_many_steps_are_scored_in_pieces_so_that_it_shows_that_the_model_works():
    """Regression: a quality report scored thousands of steps in one call, made no progress that shows, and was killed
    as a PRM that hangs."""
    pulses = []

    class Watched(FakeScorer):
        def score(self, steps):
            pulses.append(scorer.pulse)
            return super().score(steps)

    fake = Watched()
    scorer = PrmScorer(fake)
    group = make_group("a", num_turns=(100, 50))
    assert (await scorer.score_group(group)).raw == expected(group)
    assert [len(call) for call in fake.calls] == [64, 64, 22]
    assert pulses == [Pulse(done=0, num_open=150), Pulse(done=64, num_open=150), Pulse(done=128, num_open=150)]
    assert scorer.pulse == Pulse(done=150, num_open=0)


async def test_calls_at_the_same_moment_take_two_model_calls():
    fake = FakeScorer()
    scorer = PrmScorer(fake)
    await asyncio.gather(*(scorer.score_group(make_group(name)) for name in "abcdef"))
    assert [len(call) for call in fake.calls] == [3, 15]


async def test_step_that_was_scored_is_never_scored_again():
    fake = FakeScorer()
    scorer = PrmScorer(fake)
    first = await scorer.score_group(make_group("a"))
    assert await scorer.score_group(make_group("a")) == first
    assert scorer.num_scored == 3
    assert len(fake.calls) == 1


async def test_equal_steps_of_one_call_are_scored_once():
    fake = FakeScorer()
    (step,) = step_texts(make_group("a", num_turns=(1,)).trajectories[0])
    assert await PrmScorer(fake).score([step, step, step]) == [score_of(step)] * 3
    assert [len(call) for call in fake.calls] == [1]


async def test_equal_steps_of_waiting_calls_are_scored_once():
    fake = FakeScorer()
    scorer = PrmScorer(fake)
    tasks = await start_held(fake, scorer, make_group("a"))
    tasks += await start(scorer, *[make_group("b")] * 3)
    fake.release()
    found = await asyncio.gather(*tasks)
    assert [scores.raw for scores in found[1:]] == [expected(make_group("b"))] * 3
    assert set(fake.times_scored.values()) == {1}


async def test_step_that_is_being_scored_is_not_scored_again():
    fake = FakeScorer()
    scorer = PrmScorer(fake)
    tasks = await start_held(fake, scorer, make_group("a"))
    tasks += await start(scorer, make_group("a"))
    fake.release()
    assert [scores.raw for scores in await asyncio.gather(*tasks)] == [expected(make_group("a"))] * 2
    assert set(fake.times_scored.values()) == {1}


async def test_step_without_a_score_is_remembered_too():
    fake = FakeScorer()
    scorer = PrmScorer(fake)
    for _ in range(2):
        assert (await scorer.score_group(make_group("too long", num_turns=(1,)))).raw == ((None,),)
    assert len(fake.calls) == 1


async def test_cache_smaller_than_a_call_loses_no_answer():
    scorer = PrmScorer(FakeScorer(), max_cached=2)
    group = make_group("a", num_turns=(4, 3))
    assert (await scorer.score_group(group)).raw == expected(group)


async def test_eviction_under_many_callers_loses_no_answer():
    fake = FakeScorer()
    scorer = PrmScorer(fake, max_cached=4)
    groups = [make_group(name, num_turns=(3, 2)) for name in "abcdefgh"]
    async with asyncio.timeout(10):
        found = await asyncio.gather(*map(scorer.score_group, groups))
    assert [scores.raw for scores in found] == list(map(expected, groups))


async def test_oldest_scores_are_evicted_first():
    fake = FakeScorer()
    scorer = PrmScorer(fake, max_cached=6)
    for name in ("a", "b", "c", "b", "a"):
        await scorer.score_group(make_group(name))
    assert [len(call) for call in fake.calls] == [3, 3, 3, 3]
    assert fake.calls[0] == fake.calls[3]


async def test_nothing_is_evicted_from_a_cache_with_room():
    """Regression: a cache that was more than half full forgot its oldest scores."""
    fake = FakeScorer()
    scorer = PrmScorer(fake, max_cached=8)
    for name in ("a", "b", "a", "b"):
        await scorer.score_group(make_group(name))
    assert len(fake.calls) == 2


async def test_error_reaches_its_caller_and_the_next_call_works():
    fake = FakeScorer(errors=[PrmError("broken")])
    scorer = PrmScorer(fake)
    with pytest.raises(PrmError, match="broken"):
        await scorer.score_group(make_group("a"))
    assert (await scorer.score_group(make_group("a"))).raw == expected(make_group("a"))


async def test_error_of_one_call_does_not_reach_those_that_waited_for_it():
    fake = FakeScorer(errors=[PrmError("broken")])
    scorer = PrmScorer(fake)
    tasks = await start_held(fake, scorer, make_group("a"))
    tasks += await start(scorer, make_group("b"), make_group("c"))
    fake.release()
    broken, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(broken, PrmError)
    assert [scores.raw for scores in others] == [expected(make_group("b")), expected(make_group("c"))]


async def test_error_in_a_shared_batch_is_raised_once_and_the_others_are_scored_again():
    fake = FakeScorer(errors=[None, PrmError("broken")])
    scorer = PrmScorer(fake)
    tasks = await start_held(fake, scorer, make_group("a"))
    tasks += await start(scorer, make_group("b"), make_group("c"))
    fake.release()
    first, broken, other = await asyncio.gather(*tasks, return_exceptions=True)
    assert first.raw == expected(make_group("a"))
    assert isinstance(broken, PrmError)
    assert other.raw == expected(make_group("c"))


async def test_model_that_stays_broken_fails_every_caller():
    fake = FakeScorer(errors=[PrmError("broken")] * 3)
    scorer = PrmScorer(fake)
    async with asyncio.timeout(10):
        found = await asyncio.gather(*(scorer.score_group(make_group(name)) for name in "abc"), return_exceptions=True)
    assert [type(error) for error in found] == [PrmError] * 3


async def test_caller_that_gives_up_while_waiting_harms_no_other():
    fake = FakeScorer()
    scorer = PrmScorer(fake)
    tasks = await start_held(fake, scorer, make_group("a"))
    tasks += await start(scorer, make_group("b"), make_group("c"))
    tasks[1].cancel()
    fake.release()
    first, gone, other = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(gone, asyncio.CancelledError)
    assert (first.raw, other.raw) == (expected(make_group("a")), expected(make_group("c")))


async def test_pulse_tells_a_model_that_computes_from_one_that_hangs():
    """Asked from the event loop, which goes round while the model's thread stands still."""
    prm = FakeScorer()
    scorer = PrmScorer(prm)
    assert scorer.pulse == Pulse(done=0, num_open=0)
    prm.hold()
    scoring = asyncio.create_task(scorer.score_group(make_group("a")))
    await asyncio.to_thread(prm.entered.wait, 10)
    assert scorer.pulse == Pulse(done=0, num_open=3)
    await asyncio.sleep(0.05)
    assert scorer.pulse == Pulse(done=0, num_open=3)
    prm.release()
    await scoring
    assert scorer.pulse == Pulse(done=3, num_open=0)
