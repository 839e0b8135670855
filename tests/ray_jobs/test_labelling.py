import asyncio
import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from configs.run import RunConfig
from ray_jobs.phases.label import (
    MAX_FAILURES_IN_A_ROW,
    MAX_OPEN_STEPS,
    LabellingStoppedError,
    label,
    label_steps,
    labeller_name,
    labeller_of,
    labels_of,
)
from ray_jobs.run.folder import RunPaths
from reward.judge_client import BudgetExceededError, ChatError
from reward.labels import LabelError, StepLabel, append_label, read_labels
from reward.labels.judge import StepJudge
from tests.reward.chat_server import Answer, FakeChatServer, says
from tests.reward.test_judge import PRICED, judge_of, step, verdict
from tests.reward.test_step_text import decided, make_trajectory

JUDGED = {"type": "judge", "judge": {"model": "judge-1"}}


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "labels.jsonl"


@pytest.fixture
def receipts(tmp_path):
    return tmp_path / "receipts.jsonl"


class ScriptedLabeller:
    """Scores every step 0.5. `trouble` maps a step's number to the error that it meets instead. `pause_s` lets
    steps take different times."""

    name = "scripted"

    def __init__(self, trouble=(), *, pause_s=lambda number: 0.0):
        self.trouble = dict(trouble)
        self.asked = []
        self.under_way = self.most_under_way = 0
        self._pause_s = pause_s

    async def label(self, step):
        self.asked.append(step.step)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(self._pause_s(step.step))
        self.under_way -= 1
        if step.step in self.trouble:
            raise self.trouble[step.step]
        return make_label(step, self.name)


def make_label(step, labeller="scripted", score=0.5):
    return StepLabel(
        trajectory_id=step.trajectory_id,
        task_id=step.task_id,
        step=step.step,
        labeller=labeller,
        text_digest=step.digest,
        score=score,
    )


def make_steps(count):
    return [step(number) for number in range(count)]


async def run(count, labeller, path, on_step=lambda: None):
    return await label_steps(make_steps(count), labeller, path, on_step)


def numbers_on_disk(path):
    return sorted(label.step for label in read_labels(path))


# Resuming.


async def test_every_step_gets_one_label(path):
    done = await run(40, ScriptedLabeller(), path)
    assert numbers_on_disk(path) == list(range(40))
    assert (sorted(label.step for label in done.labels), done.failures) == (list(range(40)), ())


async def test_what_is_labelled_is_not_labelled_again(path):
    await run(3, ScriptedLabeller(), path)
    labeller = ScriptedLabeller()
    done = await run(5, labeller, path)
    assert labeller.asked == [3, 4]
    assert numbers_on_disk(path) == [0, 1, 2, 3, 4]
    assert len(done.labels) == 5


async def test_a_label_that_a_crash_cut_off_is_given_again(path):
    await run(3, ScriptedLabeller(), path)
    path.write_bytes(path.read_bytes()[:-5])
    labeller = ScriptedLabeller()
    await run(3, labeller, path)
    assert len(labeller.asked) == 1
    assert numbers_on_disk(path) == [0, 1, 2]


async def test_a_label_of_another_labeller_or_of_another_text_is_no_label(path):
    [one] = make_steps(1)
    append_label(path, make_label(one, "another"))
    append_label(path, make_label(step(0, thought="other words")))
    labeller = ScriptedLabeller()
    await run(1, labeller, path)
    assert labeller.asked == [0]


async def test_progress_counts_labelled_failed_and_known_steps(path):
    await run(3, ScriptedLabeller(), path)
    done = []
    await run(6, ScriptedLabeller({4: LabelError("no verdict")}), path, lambda: done.append(1))
    assert len(done) == 6


async def test_steps_are_labelled_side_by_side_but_never_too_many(path):
    labeller = ScriptedLabeller(pause_s=lambda number: 0.002)
    await run(3 * MAX_OPEN_STEPS, labeller, path)
    assert labeller.most_under_way == MAX_OPEN_STEPS


# Failures of single steps.


async def test_a_step_without_a_verdict_is_reported_left_out_and_tried_in_the_next_pass(path):
    done = await run(5, ScriptedLabeller({2: LabelError("votes are 0.7 apart")}), path)
    assert done.failures == ("votes are 0.7 apart",)
    assert numbers_on_disk(path) == [0, 1, 3, 4]
    labeller = ScriptedLabeller()
    again = await run(5, labeller, path)
    assert (labeller.asked, again.failures) == ([2], ())
    assert numbers_on_disk(path) == [0, 1, 2, 3, 4]


async def test_failures_that_are_not_in_a_row_stop_nothing(path):
    trouble = {number: LabelError(str(number)) for number in range(100) if number % 10}
    done = await run(100, ScriptedLabeller(trouble), path)
    assert len(done.failures) == 90
    assert numbers_on_disk(path) == list(range(0, 100, 10))


async def test_so_many_failures_in_a_row_stop_the_pass(path):
    labeller = ScriptedLabeller({number: LabelError(f"reason {number}") for number in range(10, 500)})
    with pytest.raises(
        LabellingStoppedError, match=rf"{MAX_FAILURES_IN_A_ROW} steps in a row got no label from scripted, .* reason \d"
    ):
        await run(500, labeller, path)
    assert numbers_on_disk(path) == list(range(10))
    assert len(labeller.asked) < 10 + MAX_FAILURES_IN_A_ROW + 2 * MAX_OPEN_STEPS


async def test_one_failure_less_does_not_stop_the_pass(path):
    trouble = {number: LabelError("no") for number in range(MAX_FAILURES_IN_A_ROW - 1)}
    done = await run(MAX_FAILURES_IN_A_ROW + 4, ScriptedLabeller(trouble), path)
    assert len(done.failures) == MAX_FAILURES_IN_A_ROW - 1
    assert len(done.labels) == 5


# What stops the whole pass.


async def test_an_error_that_every_step_would_meet_is_raised_after_begun_steps_are_written(path):
    labeller = ScriptedLabeller(
        {3: PermissionError("the key was refused")}, pause_s=lambda number: 0.0 if number == 3 else 0.05
    )
    with pytest.raises(PermissionError, match="the key was refused"):
        await run(200, labeller, path)
    assert sorted(labeller.asked) == list(range(MAX_OPEN_STEPS))
    assert numbers_on_disk(path) == [number for number in range(MAX_OPEN_STEPS) if number != 3]


async def test_of_several_stopping_errors_the_first_is_raised(path):
    labeller = ScriptedLabeller(
        {0: KeyError("late"), 1: ValueError("early")}, pause_s=lambda number: 0.02 if number == 0 else 0.0
    )
    with pytest.raises(ValueError, match="early"):
        await run(2, labeller, path)


# With the real judge.


async def judged(server, path, receipts, count=6, **settings):
    judge = judge_of(server, receipts, **settings)
    return await run(count, judge, path)


def paid(receipts):
    return sum(1 for line in receipts.read_text().splitlines() if json.loads(line)["text"])


async def test_a_server_that_dies_mid_run_costs_only_what_is_missing(path, receipts):
    enough = threading.Event()

    def answer(_):
        # Whatever comes after the tenth, before the server is gone, gets half a reply.
        if len(server.requests) == 10:
            enough.set()
        given = verdict(0.7)
        given.cut = len(server.requests) > 10
        return given

    with FakeChatServer(answer) as server:
        first = asyncio.create_task(judged(server, path, receipts, max_retries=0))
        await asyncio.to_thread(enough.wait, 10)
    done = await first
    known = paid(receipts)
    assert 0 < len(done.failures) < 6
    assert len(done.labels) + len(done.failures) == 6
    assert 8 <= known < 24
    with FakeChatServer(verdict(0.4), port=server.port) as back:
        again = await judged(back, path, receipts)
    assert len(back.requests) == 24 - known
    assert again.failures == ()
    assert numbers_on_disk(path) == [0, 1, 2, 3, 4, 5]
    before = {label.step: label.score for label in done.labels}
    assert all(label.score == before.get(label.step, label.score) for label in again.labels)


async def test_a_spent_budget_stops_the_pass_and_a_larger_one_pays_for_the_rest_only(path, receipts):
    # Four replies of $1 a step: ten of them are two steps and a half.
    with FakeChatServer(verdict(0.7)) as server:
        with pytest.raises(BudgetExceededError, match=r"raise label\.judge\.max_cost_usd"):
            await judged(server, path, receipts, **PRICED, max_cost_usd=10.5)
        assert len(server.requests) == 10
        assert numbers_on_disk(path) == [0, 1]
        done = await judged(server, path, receipts, **PRICED, max_cost_usd=24.5)
    assert len(server.requests) == 24
    assert len(done.labels) == 6
    assert sum(label.details["cost_usd"] for label in done.labels) == pytest.approx(24.0)


async def test_a_refused_key_is_raised_and_never_a_failure_of_a_step(path, receipts):
    with FakeChatServer(Answer(status=401)) as server, pytest.raises(ChatError, match="set a valid key"):
        await judged(server, path, receipts)
    assert numbers_on_disk(path) == []


async def test_a_judge_that_never_gives_a_verdict_stops_the_pass(path, receipts):
    with (
        FakeChatServer(says("It is good.")) as server,
        pytest.raises(LabellingStoppedError, match="in a row got no label from judge:judge-1"),
    ):
        await judged(server, path, receipts, count=40, max_retries=0, num_votes=1, max_concurrency=8)
    assert numbers_on_disk(path) == []


async def test_a_verdict_whose_reason_is_no_unicode_is_a_label_like_others(path, receipts):
    with FakeChatServer(says('{"reason": "half \\ud83d", "score": 0.7}')) as server:
        done = await judged(server, path, receipts, count=1)
    assert [label.score for label in done.labels] == [0.7]


# Who labels what.


def collected():
    """Eight one-step trajectories of four tasks."""
    found = []
    for number in range(8):
        one = make_trajectory(decided("think", f"{number}", "Noted."), id=f"g{number // 2}/{number}")
        task = type(one.task)(id=f"t{number // 2}", dataset="arith", question="?", answer="1")
        found.append(make_trajectory(*one.turns, task=task, id=one.id))
    return found


async def no_engine(*_):
    raise AssertionError("nothing is to be continued")


def labeller(receipts, **settings):
    return labeller_of(RunConfig(label=settings), collected(), continue_from=no_engine, policy={}, receipts=receipts)


async def test_the_judge_of_the_recipe_writes_its_receipts_where_it_is_told(receipts):
    assert isinstance(labeller(receipts, **JUDGED), StepJudge)
    assert receipts.exists()


def shelf_of(article: str) -> str:
    """On which shelf an article is."""


async def test_the_judge_of_the_recipe_is_told_of_the_recipes_own_tools(receipts):
    own = {"shelf_of": {"source": f"{__name__}:shelf_of"}, "news": {"source": "mcp:news", "description": "the news"}}
    with FakeChatServer(verdict(0.7)) as server:
        judge = {"model": "judge-1", "base_url": server.url, "max_cost_usd": 10.0, **PRICED}
        config = RunConfig(
            label={"type": "judge", "judge": judge}, envs={"actions": ("shelf_of", "news", "answer"), "tools": own}
        )
        judging = labeller_of(config, collected(), continue_from=no_engine, policy={}, receipts=receipts)
        await judging.label(step(0))
    asked = server.requests[0][2]["messages"][0]["content"]
    assert "Its actions: shelf_of (On which shelf an article is.), news (the news), answer (ends the problem)." in asked


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        ({"type": "monte_carlo"}, "monte_carlo"),
        ({"type": "plan"}, "plan"),
        (JUDGED, "judge:judge-1"),
    ],
)
def test_labels_of_another_labeller_are_left_out(settings, own):
    """Regression: whatever was not of Monte Carlo counted as the recipe's labeller's, and a PRM learnt the labels that
    were given last, by whomever."""
    given = {name: make_label(step(0), name) for name in ("plan", "monte_carlo", "judge:judge-1", "judge:judge-2")}
    assert labels_of(RunConfig(label=settings).label, given.values()) == [given[own]]


@pytest.mark.parametrize("settings", [{"type": "plan"}, {"type": "monte_carlo"}, JUDGED])
def test_the_recipes_labeller_is_known_by_the_name_that_its_labels_bear(receipts, settings):
    assert labeller_name(RunConfig(label=settings).label) == labeller(receipts, **settings).name


# What is said of it, in a run and by the command.


class FakeRun:
    """A run whose labels stand in `folder`, and what it said."""

    def __init__(self, folder, **settings):
        self.config = RunConfig(label=settings)
        self.folder, self.said, self.facts = RunPaths(folder), [], {}
        self.console = SimpleNamespace(note=self.said.append)
        self.rollouts, self.policy = SimpleNamespace(continue_from=self._continue), {"model": "demo"}

    async def _continue(self, trajectory, num_turns, count):
        return [trajectory] * count

    def finished(self, phase):
        return None

    @contextmanager
    def phase(self, name, total):
        yield SimpleNamespace(facts=self.facts, advance=lambda: None)


def test_dry_run_and_labelling_tell_the_same_numbers(tmp_path):
    trajectories = [
        make_trajectory(decided("think", "a", "Noted."), decided("answer", "1"), id=f"g/{number}")
        for number in range(3)
    ]
    run = FakeRun(tmp_path, type="monte_carlo", continuations=4)
    assert label(run, trajectories, dry_run=True) == []
    assert len(label(run, trajectories)) == 6
    dry, counts, took = run.said
    # Of six steps the three last ones are labelled by their own outcome.
    assert dry == "monte_carlo: 6 steps, at most 12 trajectories, no cost"
    assert counts == "labelled: labeller monte_carlo, labels 6, unlabelled 0"
    assert took == "monte_carlo: 6 of 6 steps labelled, so far 12 trajectories, no cost"


def test_a_run_tells_and_keeps_what_the_judge_cost(tmp_path):
    [one] = [make_trajectory(decided("answer", "1"), id="g/0")]
    with FakeChatServer(verdict(0.7)) as server:
        judge = {"model": "judge-1", "base_url": server.url, "max_cost_usd": 10.0, **PRICED}
        run = FakeRun(tmp_path, type="judge", judge=judge)
        label(run, [one], dry_run=True)
        label(run, [one])
    # Three blind votes and one in hindsight, of $1 each.
    assert run.said[0].startswith("judge:judge-1: 1 steps, at most 4 calls, ")
    assert run.said[0].endswith(" tokens out, 4.0000 US dollars")
    assert run.said[-1].startswith("judge:judge-1: 1 of 1 steps labelled, so far 4 calls, ")
    assert run.said[-1].endswith(" tokens out, 4.0000 US dollars")
    assert (run.facts["num_labels"], run.facts["spent"]["requests"]) == (1, 4)
    assert run.facts["spent"]["cost_usd"] == pytest.approx(4.0)
