import json
from pathlib import Path

import pytest
from evaluating import ScriptedSolver, broken, config_for, right_answer, use

from configs.base import fastest_precision
from configs.errors import UserError
from envs.types import Task
from ray_jobs.compare import comparison, run_compare, write_comparison_page
from ray_jobs.evaluate import EvaluationRequest, run_evaluation
from ray_jobs.evaluation import read_evaluation
from ray_jobs.run.folder import RunFolder
from rollout.types import Reward, Trajectory

SAMPLE = Path(__file__).parents[1] / "envs" / "benchmark_sample"
OTHER_PRECISION = {"bfloat16": "float32", "float32": "bfloat16"}[fastest_precision("cpu")]
MIX = ("evaluation.mix={lookup=0.5, two_lookup=0.25, branch=0.25}", "evaluation.num_tasks=40")


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """Evaluate a policy with the answers of `answer(task, seed)`, where True and False stand for right and wrong."""

    def run(name, answer, *overrides, benchmarks=(), seeds=1):
        def answer_of(task, seed):
            said = answer(task, seed)
            return {True: right_answer(task), False: "no"}.get(said, said) if isinstance(said, bool) else said

        use(monkeypatch, ScriptedSolver(answer_of))
        out = tmp_path / name
        request = EvaluationRequest(benchmarks=benchmarks, data=SAMPLE, whole=False, num_seeds=seeds, out=out)
        run_evaluation(config_for(tmp_path, *MIX, *overrides), request)
        return out

    return run


def none(task, seed):
    return False


def every(task, seed):
    return True


def compared(before, after, **options):
    page = run_compare(before, after, **{"out": None, "anyway": False} | options)
    return json.loads((page.parent / "comparison.json").read_text())


def test_gain_is_paired_by_item_and_benchmark(evaluate):
    result = compared(evaluate("before", none), evaluate("after", lambda task, seed: task.dataset == "lookup"))
    row = result["benchmarks"]["lookup"]
    assert (row["num_tasks"], row["before"], row["after"]) == (20, 0.0, 1.0)
    assert (row["only_before"], row["only_after"], row["p"]) == (0, 20, 2 / 2**20)
    assert result["benchmarks"]["branch"]["p"] == 1.0
    assert result["benchmarks"]["branch"]["items_for_this_gain"] is None
    assert (result["all"]["num_tasks"], result["all"]["gain"]) == (40, 0.5)
    assert result["all"]["ci95"] == pytest.approx([0.32, 0.64], abs=0.02)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("agent.max_steps=2", "agent"),
        (f"rollout.engine.dtype={OTHER_PRECISION}", "quantisation"),
        ("envs.search_latency_s=0.5", "envs"),
        ("evaluation.num_tasks=20", "items"),
    ],
)
def test_different_settings_are_rejected(evaluate, override, part):
    before, after = evaluate("before", none), evaluate("after", every, override)
    with pytest.raises(UserError, match=part):
        compared(before, after)


def test_seeds_are_averaged_by_item(evaluate):
    warm = "evaluation.temperature=0.5"
    before = evaluate("before", none, warm, seeds=4)
    after = evaluate("after", lambda task, seed: task.dataset == "branch" and seed == 0, warm, seeds=4)
    row = compared(before, after)["benchmarks"]["branch"]
    assert (row["num_tasks"], row["after"], row["only_after"]) == (10, 0.25, 10)
    # Ten items of one sign: 2 / 2^10.
    assert (row["test"], row["p"]) == ("exact sign-flip permutation test", 2 / 2**10)
    assert row["discordant"] == pytest.approx(1 / 16)


def test_items_that_one_side_could_not_score_are_left_out(evaluate):
    def fails_on_four(task, seed):
        return broken(task, seed) if task.dataset == "branch" and int(task.id.split("-")[-1]) < 4 else True

    result = compared(evaluate("before", none), evaluate("after", fails_on_four))
    row = result["benchmarks"]["branch"]
    assert (row["num_tasks"], row["before"], row["after"]) == (6, 0.0, 1.0)
    assert result["all"]["num_tasks"] == 36
    assert result["left_out"] == sorted(f"branch/branch-eval-1000000-{number}" for number in range(4))


def test_page_escapes_hostile_text(evaluate, tmp_path):
    evil = "<script>alert(1)</script>"
    sides = tuple(map(read_evaluation, (evaluate("before", none), evaluate("after", every))))
    result = comparison(*sides) | {"before": evil, "after": evil, "verdict": evil}
    for changes in ({}, {"differs_in": [evil]}):
        page = write_comparison_page(tmp_path, sides, result | changes).read_text()
        assert "<script" not in page
        assert "&lt;script&gt;" in page


def test_phases_of_a_training_run_are_compared(tmp_path):
    def record(phase, index, answer):
        task = Task(id=f"lookup-{index}", dataset="lookup", question="?", answer="1")
        reward = Reward(outcome=float(answer == "1"), total=float(answer == "1"))
        attempt = {"task": task, "answer": answer, "reward": reward, "phase": phase, "stop_reason": "answered"}
        return Trajectory(id="t", group_id="g", turns=(), **attempt)

    with RunFolder.open(config_for(tmp_path)) as folder:
        folder.log_trajectories(record("eval_before", index, "0") for index in range(8))
        folder.log_trajectories(record("eval_after", index, "1") for index in range(8))
    moved = folder.path.rename(tmp_path / "moved")
    result = compared(moved, None)
    assert (result["all"]["only_after"], result["all"]["p"]) == (8, 2 / 2**8)
    assert result["differs_in"] == []
    for folder in (tmp_path / "model", tmp_path):
        with pytest.raises(UserError):
            compared(folder, None)
