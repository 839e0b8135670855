import html
import json
import re
from pathlib import Path

import pytest
from evaluating import HESITANT, ScriptedSolver, broken, config_for, right_answer, use

from configs.base import fastest_precision
from envs.types import Task
from ray_jobs.compare import ComparisonError, comparison, run_compare
from ray_jobs.evaluate import EvaluationRequest, run_evaluation
from ray_jobs.evaluation_folder import EvaluationError, read_evaluation
from ray_jobs.run.folder import RunFolder
from ray_jobs.viewer.evaluation import write_comparison_page
from rollout.types import Reward, Trajectory

SAMPLE = Path(__file__).parents[1] / "envs" / "benchmark_sample"
OTHER_PRECISION = {"bfloat16": "float32", "float32": "bfloat16"}[fastest_precision("cpu")]
MIX = ("evaluation.mix={lookup=0.5, two_lookup=0.25, branch=0.25}", "evaluation.num_tasks=40")


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """An evaluation whose policy solves what `solves(task, seed)` says."""

    def run(name, solves, *overrides, benchmarks=(), seeds=1):
        use(monkeypatch, ScriptedSolver(lambda task, seed: right_answer(task) if solves(task, seed) else "no"))
        request = EvaluationRequest(
            benchmarks=benchmarks, data=SAMPLE, whole=False, num_seeds=seeds, out=tmp_path / name
        )
        run_evaluation(config_for(tmp_path, *MIX, *overrides), request)
        return tmp_path / name

    return run


def compared(before, after, **options):
    page = run_compare(before, after, **{"out": None, "anyway": False} | options)
    return json.loads((page.parent / "comparison.json").read_text()), words_of(page)


def words_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.read_text().partition("</style>")[2]))


def test_comparison_takes_the_place_of_no_other_report(evaluate, tmp_path):
    """Regression: with --out an evaluation, or a training run, lost its report.html."""
    before, after = evaluate("before", lambda task, seed: False), evaluate("after", lambda task, seed: True)
    with RunFolder.create(config_for(tmp_path)) as run:
        (run.path / "report.html").write_text("the run's")
    pages = {folder: (folder / "report.html").read_bytes() for folder in (before, after, run.path)}
    for folder, what in ((before, "an evaluation"), (after, "an evaluation"), (run.path, "a training run")):
        with pytest.raises(EvaluationError, match=f"'{folder}' is the folder of {what}, .* another folder with --out"):
            compared(before, after, out=folder)
    assert {folder: (folder / "report.html").read_bytes() for folder in pages} == pages


def test_gain_is_paired_by_item_and_told_family_by_family(evaluate):
    before = evaluate("before", lambda task, seed: False)
    after = evaluate("after", lambda task, seed: task.dataset == "lookup")
    result, words = compared(before, after)
    row = result["benchmarks"]["lookup"]
    assert (row["num_items"], row["before"], row["after"]) == (20, 0.0, 1.0)
    assert (row["only_before"], row["only_after"], row["p"]) == (0, 20, 2 / 2**20)
    assert result["benchmarks"]["branch"]["p"] == 1.0
    assert result["benchmarks"]["branch"]["items_for_this_gain"] is None
    assert (result["all"]["num_items"], result["all"]["gain"]) == (40, 0.5)
    assert result["all"]["gain_ci95"] == pytest.approx([0.32, 0.64], abs=0.02)
    low, high = result["all"]["gain_ci95"]
    assert f"+50.0 points (95% interval {100 * low:+.1f} to {100 * high:+.1f})" in result["verdict"]
    assert "Yes. On 40 paired items: 0.0% before, 50.0% after." in words
    assert "are equal, by digest" in words


def test_small_gain_is_not_sold_as_one_and_its_price_in_items_is_told(evaluate):
    before = evaluate("before", lambda task, seed: False)
    after = evaluate("after", lambda task, seed: task.dataset == "branch" and int(task.id.split("-")[-1]) < 2)
    result, words = compared(before, after)
    assert result["all"]["p"] == 0.5
    assert "This comparison does not show it." in words
    # A gain of 2 of 40 with no item lost: (1.959964 sqrt(.05) + .841621 sqrt(.05 - .0025))^2 / .0025 + 1 / .05.
    assert result["all"]["items_for_this_gain"] == 175
    assert "for 5 points" in words


def test_loss_is_called_a_loss(evaluate):
    before = evaluate("before", lambda task, seed: True)
    after = evaluate("after", lambda task, seed: task.dataset == "lookup")
    result, words = compared(before, after)
    assert result["all"]["gain"] == -0.5
    assert "No, it is worse." in words


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("agent.max_steps=2", "sampling"),
        (f"rollout.engine.dtype={OTHER_PRECISION}", "quantisation"),
        ("rollout.engine.adapter_mode=native", "quantisation"),
        ("envs.max_result_chars=300", "tools"),
        ("evaluation.num_tasks=20", "items"),
        ("seed=1", "items"),
    ],
)
def test_evaluations_that_differ_in_more_than_the_policy_are_refused(evaluate, override, part):
    before = evaluate("before", lambda task, seed: False)
    after = evaluate("after", lambda task, seed: True, override)
    with pytest.raises(ComparisonError, match=f"differ in {part}, and not in the policy alone"):
        compared(before, after)


def test_verifier_of_other_code_is_refused_and_flagged_when_it_is_compared_anyway(evaluate):
    before = evaluate("before", lambda task, seed: False)
    after = evaluate("after", lambda task, seed: True)
    facts = json.loads((after / "evaluation.json").read_text())
    facts["identity"]["verifier"]["code"] = "0" * 64
    (after / "evaluation.json").write_text(json.dumps(facts))
    with pytest.raises(ComparisonError, match="differ in verifier"):
        compared(before, after)
    result, words = compared(before, after, anyway=True)
    assert result["differs_in"] == ["verifier"]
    assert "This cannot be told: they also differ in verifier." in words
    assert "Yes." not in words


def test_item_with_another_question_under_the_same_id_is_never_paired(evaluate):
    before = evaluate("before", lambda task, seed: False, benchmarks=("musique",))
    after = evaluate("after", lambda task, seed: True, benchmarks=("musique",))
    items = after / "items.jsonl"
    items.write_text(items.read_text().replace("capital of the country where", "capital of that country where"))
    with pytest.raises(ComparisonError, match=r"another question or reference, first musique/musique-0"):
        compared(before, after, anyway=True)


def test_evaluations_without_a_common_item_cannot_be_compared(evaluate):
    before = evaluate("before", lambda task, seed: False, benchmarks=("musique",))
    after = evaluate("after", lambda task, seed: True, benchmarks=("gaia",))
    with pytest.raises(ComparisonError, match="no item in common"):
        compared(before, after, anyway=True)


def test_seeds_are_averaged_by_item_before_they_are_compared(evaluate):
    warm = "evaluation.temperature=0.5"
    before = evaluate("before", lambda task, seed: False, warm, seeds=4)
    after = evaluate("after", lambda task, seed: task.dataset == "branch" and seed == 0, warm, seeds=4)
    result, words = compared(before, after)
    row = result["benchmarks"]["branch"]
    assert (row["num_items"], row["after"], row["only_after"]) == (10, 0.25, 10)
    # Ten items of one sign: 2 / 2^10.
    assert (row["test"], row["p"]) == ("exact sign-flip permutation test", 2 / 2**10)
    assert "p is that of the exact paired sign-flip permutation test" in words
    assert "McNemar" not in words
    assert row["discordant"] == pytest.approx(1 / 16)


def test_items_that_one_side_could_not_score_are_left_out_on_both_and_named(tmp_path, monkeypatch):
    def run(name, answer):
        use(monkeypatch, ScriptedSolver(answer))
        run_evaluation(config_for(tmp_path, *MIX), EvaluationRequest(out=tmp_path / name))
        return tmp_path / name

    def fails(task):
        return task.dataset == "branch" and int(task.id.split("-")[-1]) < 4

    before = run("before", lambda task, seed: "no")
    after = run("after", lambda task, seed: broken(task, seed) if fails(task) else right_answer(task))
    result, words = compared(before, after)
    row = result["benchmarks"]["branch"]
    assert (row["num_items"], row["before"], row["after"]) == (6, 0.0, 1.0)
    assert result["all"]["num_items"] == 36
    assert result["left_out"] == sorted(f"branch/branch-eval-1000000-{number}" for number in range(4))
    assert (result["infrastructure_failures"], result["undecided"]) == ([0, 4], [0, 0])
    said = "Left out are 4 items that one side could not score, because the engine or a tool failed at every attempt: "
    assert said in words


def test_what_a_scorer_could_not_tell_is_left_out_for_that_reason(tmp_path, monkeypatch):
    settings = ("evaluation.mix={lookup=1}", "evaluation.num_tasks=10", *HESITANT)

    def run(name, answer):
        use(monkeypatch, ScriptedSolver(answer))
        run_evaluation(config_for(tmp_path, *settings), EvaluationRequest(out=tmp_path / name))
        return tmp_path / name

    before = run("before", lambda task, seed: "no")
    after = run("after", lambda task, seed: "who knows" if task.id.endswith("-3") else task.answer)
    result, words = compared(before, after)
    assert (result["infrastructure_failures"], result["undecided"]) == ([0, 0], [0, 1])
    assert result["all"]["num_items"] == 9
    said = "Left out are 1 items that one side could not score, because a scorer of one's own could not tell: lookup/"
    assert said in html.unescape(words)


def test_hostile_text_is_escaped(evaluate, tmp_path):
    evil = "<script>alert(1)</script>"
    folders = evaluate("before", lambda task, seed: False), evaluate("after", lambda task, seed: True)
    sides = tuple(map(read_evaluation, folders))
    result = comparison(*sides) | {"before": evil, "after": evil, "verdict": evil, "unproven": [evil]}
    for changes in ({}, {"differs_in": [evil]}):
        page = write_comparison_page(tmp_path, sides, result | changes).read_text()
        assert "<script" not in page
        assert page.count("&lt;script&gt;") == (5 if changes else 4)


def test_folder_that_is_no_evaluation_is_named(evaluate, tmp_path):
    before = evaluate("before", lambda task, seed: False)
    with pytest.raises(EvaluationError, match="holds no evaluation"):
        compared(before, tmp_path)


def test_phases_of_a_training_run_compare_without_a_second_folder(tmp_path):
    def record(phase, index, answer):
        task = Task(id=f"lookup-{index}", dataset="lookup", question="?", answer="1")
        reward = Reward(outcome=float(answer == "1"), total=float(answer == "1"))
        facts = {"answer": answer, "stop_reason": "answered", "phase": phase, "reward": reward}
        return Trajectory(id="t", group_id="g", task=task, turns=(), **facts)

    with RunFolder.create(config_for(tmp_path)) as folder:
        folder.log_trajectories(record("eval_before", index, "0") for index in range(8))
        folder.log_trajectories(record("eval_after", index, "1") for index in range(8))
    moved = folder.path.rename(tmp_path / "moved")
    result, words = compared(moved, None)
    assert (result["all"]["only_after"], result["all"]["p"]) == (8, 2 / 2**8)
    assert result["differs_in"] == []
    assert "eval_before → eval_after" in words.replace("&rarr;", "→")
    assert "Both are phases of one run: one base model" in words
    assert "digest none" not in words
    with pytest.raises(EvaluationError, match="is not the folder of a run"):
        compared(tmp_path / "model", None)
