import asyncio
import itertools
import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from configs.errors import UserError
from configs.run import RunConfig
from ray_jobs.prm import (
    MAX_FAILURES_IN_A_ROW,
    MAX_OPEN_STEPS,
    Labels,
    label,
    labeller_name,
    labeller_of,
    labels_of,
)
from ray_jobs.run.folder import RunPaths
from ray_jobs.run.preflight import check_labelling
from reward.judge_client import BudgetExceededError, ChatError
from reward.labels import LabelError, StepLabel, append_label, read_labels
from tests.reward.chat_server import Answer, FakeChatServer, says
from tests.reward.test_judge import PRICED, judge_of, step, verdict
from tests.reward.test_step_text import decided, make_trajectory

JUDGED = {"type": "judge", "judge": {"model": "judge-1"}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "labels.jsonl"


@pytest.fixture
def receipts(tmp_path):
    return tmp_path / "receipts.jsonl"


class ScriptedLabeller:
    """A labeller that scores every step 0.5. `errors` maps the number of a step to the error that it raises."""

    name = "scripted"

    def __init__(self, errors=()):
        self.errors, self.steps = dict(errors), []

    async def label(self, step):
        self.steps.append(step.step)
        if step.step in self.errors:
            raise self.errors[step.step]
        return make_label(step, self.name)


def make_label(step, labeller="scripted"):
    return StepLabel.of(step, labeller=labeller, score=0.5)


async def run(count, labeller, path, on_step=lambda: None):
    labels = Labels(labeller, path)
    await labels.add([step(number) for number in range(count)], on_step)
    return labels.by_step, labels.failures


def numbers_on_disk(path):
    return sorted(label.step for label in read_labels(path))


async def test_labelled_steps_are_not_labelled_again(path):
    await run(3, ScriptedLabeller(), path)
    path.write_bytes(path.read_bytes()[:-5])
    labeller, finished = ScriptedLabeller({4: LabelError("no verdict")}), []
    labels, failures = await run(6, labeller, path, lambda: finished.append(1))
    assert (labeller.steps, len(finished)) == ([2, 3, 4, 5], 6)
    assert numbers_on_disk(path) == [0, 1, 2, 3, 5]
    assert (len(labels), failures) == (5, ["no verdict"])
    again = ScriptedLabeller()
    assert (await run(6, again, path))[1] == []
    assert again.steps == [4]


async def test_a_label_of_another_labeller_or_of_another_text_does_not_count(path):
    append_label(path, make_label(step(0), "another"))
    append_label(path, make_label(step(0, thought="other words")))
    labeller = ScriptedLabeller()
    await run(1, labeller, path)
    assert labeller.steps == [0]


async def test_failures_that_are_not_in_a_row_do_not_stop_the_pass(path):
    errors = {number: LabelError(str(number)) for number in range(100) if number % 10}
    _, failures = await run(100, ScriptedLabeller(errors), path)
    assert len(failures) == 90
    assert numbers_on_disk(path) == list(range(0, 100, 10))
    errors = {number: LabelError("no") for number in range(100, 100 + MAX_FAILURES_IN_A_ROW - 1)}
    await run(125, ScriptedLabeller(errors), path)


async def test_too_many_failures_in_a_row_stop_the_pass(path):
    labeller = ScriptedLabeller({number: LabelError(f"reason {number}") for number in range(10, 500)})
    with pytest.raises(UserError, match="reason"):
        await run(500, labeller, path)
    assert numbers_on_disk(path) == list(range(10))
    assert len(labeller.steps) < 10 + MAX_FAILURES_IN_A_ROW + 2 * MAX_OPEN_STEPS


async def test_too_many_failures_in_a_row_stop_all_passes_that_share_labels(path):
    labeller = ScriptedLabeller({number: LabelError("no") for number in range(400)})
    labels = Labels(labeller, path)
    passes = [[step(number) for number in range(start, start + 100)] for start in range(0, 400, 100)]
    results = await asyncio.gather(*map(labels.add, passes), return_exceptions=True)
    assert [type(result) for result in results] == [UserError] * 4
    assert len(labeller.steps) < MAX_FAILURES_IN_A_ROW + 4 * 2 * MAX_OPEN_STEPS


async def test_failures_between_labels_of_an_earlier_pass_are_not_in_a_row(path):
    errors = {number: LabelError("no") for number in range(0, 600, 20)}
    await run(600, ScriptedLabeller(errors), path)
    labels, failures = await run(600, ScriptedLabeller(errors), path)
    assert (len(labels), len(failures)) == (570, 30)


# With the real judge.


async def test_steps_about_which_the_judge_disagrees_do_not_stop_the_pass(path, receipts):
    votes = itertools.cycle((0.0, 1.0))
    with FakeChatServer(lambda _: verdict(next(votes))) as server:
        count = MAX_FAILURES_IN_A_ROW + 5
        labels, failures = await judged(server, path, receipts, count=count, max_concurrency=1)
        assert (len(labels), len(failures)) == (0, count)


async def judged(server, path, receipts, count=6, **settings):
    return await run(count, judge_of(server, receipts, **settings), path)


async def test_a_server_that_dies_costs_only_the_missing_replies(path, receipts):
    enough = threading.Event()

    def answer(_):
        # Replies after the tenth are cut until the server is gone.
        if len(server.requests) == 10:
            enough.set()
        reply = verdict(0.7)
        reply.cut = len(server.requests) > 10
        return reply

    with FakeChatServer(answer) as server:
        first = asyncio.create_task(judged(server, path, receipts, max_retries=0))
        await asyncio.to_thread(enough.wait, 10)
    labels, failures = await first
    paid = sum(1 for line in receipts.read_text().splitlines() if json.loads(line)["text"])
    assert len(labels) + len(failures) == 6
    assert 8 <= paid < 18
    with FakeChatServer(verdict(0.4), port=server.port) as back:
        all_labels, missing = await judged(back, path, receipts)
    assert len(back.requests) == 18 - paid
    assert missing == []
    assert labels.items() <= all_labels.items()


async def test_a_spent_budget_stops_the_pass_and_a_larger_one_pays_for_the_rest_only(path, receipts):
    # Three replies of $1 a step: seven of them are two steps and a third.
    with FakeChatServer(verdict(0.7)) as server:
        with pytest.raises(BudgetExceededError, match=r"label\.judge\.max_cost_usd"):
            await judged(server, path, receipts, **PRICED, max_retries=0, max_cost_usd=7.5)
        assert len(server.requests) == 7
        assert numbers_on_disk(path) == [0, 1]
        labels, _ = await judged(server, path, receipts, **PRICED, max_retries=0, max_cost_usd=18.5)
    assert (len(server.requests), len(labels)) == (18, 6)
    assert sum(label.details["cost_usd"] for label in labels.values()) == pytest.approx(18.0)


@pytest.mark.parametrize(("answer", "error"), [(Answer(status=401), ChatError), (says("It is good."), UserError)])
async def test_a_refused_key_or_a_judge_without_verdicts_stops_the_pass(path, receipts, answer, error):
    with FakeChatServer(answer) as server, pytest.raises(error):
        await judged(server, path, receipts, count=40, max_retries=0, num_votes=1)
    assert numbers_on_disk(path) == []


# The labeller of a recipe.


def labeller(receipts, **settings):
    rollouts = SimpleNamespace(continue_from=None)
    run = SimpleNamespace(config=RunConfig(**settings), rollouts=rollouts)
    run.folder = SimpleNamespace(receipts=receipts)
    return labeller_of(run, [])


def shelf_of(article: str) -> str:
    """Return the shelf of an article."""


async def test_the_rubric_lists_custom_tools(receipts):
    tools = {"shelf_of": {"source": f"{__name__}:shelf_of"}, "news": {"source": "mcp:news", "description": "the news"}}
    with FakeChatServer(verdict(0.7)) as server:
        judge = {"model": "judge-1", "base_url": server.url, "max_cost_usd": 100.0, **PRICED}
        envs = {"actions": ("shelf_of", "news", "answer"), "tools": tools}
        await labeller(receipts, label={"type": "judge", "judge": judge}, envs=envs).label(step(0))
    rubric = json.loads(server.requests[0].body)["messages"][0]["content"]
    assert "shelf_of (Return the shelf of an article.), news (the news), answer (ends the problem)." in rubric


CUSTOM = {"agent": {"type": "function", "function": "mine:solve"}, "cold_start": {"num_demonstrations": 0}}


async def test_the_rubric_for_a_custom_agent_names_no_action_of_the_planner(receipts):
    with FakeChatServer(verdict(0.7)) as server:
        judge = {"model": "judge-1", "base_url": server.url, "max_cost_usd": 100.0, **PRICED}
        await labeller(receipts, label={"type": "judge", "judge": judge}, **CUSTOM).label(step(0))
    rubric = json.loads(server.requests[0].body)["messages"][0]["content"]
    assert [part in rubric for part in ("calls of the functions", "search (", "{actions}")] == [True, False, False]


def test_only_plans_cannot_label_the_steps_of_a_custom_agent():
    for labels in ({"type": "monte_carlo"}, JUDGED):
        check_labelling(RunConfig(label=labels, **CUSTOM))
    with pytest.raises(UserError, match=r"label\.type"):
        check_labelling(RunConfig(label={"type": "plan"}, **CUSTOM))


def test_labels_of_other_labellers_are_left_out(receipts):
    labels = {name: make_label(step(0), name) for name in ("plan", "monte_carlo", "judge:judge-1", "judge:judge-2")}
    cases = {"monte_carlo": {"type": "monte_carlo"}, "plan": {"type": "plan"}, "judge:judge-1": JUDGED}
    for name, settings in cases.items():
        config = RunConfig(label=settings).label
        assert labeller_name(config) == labeller(receipts, label=settings).name == name
        assert labels_of(config, labels.values()) == [labels[name]]


def test_a_run_reports_and_records_the_cost_of_the_judge(tmp_path):
    lines, facts = [], {}

    @contextmanager
    def phase(name, total):
        yield SimpleNamespace(facts=facts, advance=lambda: None)

    with FakeChatServer(verdict(0.7)) as server:
        judge = {"model": "judge-1", "base_url": server.url, "max_cost_usd": 100.0, **PRICED}
        config, console = RunConfig(label={"type": "judge", "judge": judge}), SimpleNamespace(note=lines.append)
        run = SimpleNamespace(config=config, console=console, folder=RunPaths(tmp_path), phase=phase)
        run.finished = lambda name: None
        run.rollouts = SimpleNamespace(continue_from=None)
        trajectories = [make_trajectory(decided("answer", "1"), id="g/0")]
        label(run, trajectories)
    # Three votes of $1 each.
    assert "3 calls" in lines[-1]
    assert "3.0000" in lines[-1]
    assert (facts["num_labels"], facts["spent"]["requests"]) == (1, 3)
    assert facts["spent"]["cost_usd"] == pytest.approx(3.0)
