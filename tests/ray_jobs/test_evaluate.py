import asyncio
import html
import json
import re
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from evaluating import HESITANT, ScriptedSolver, broken, config_for, right_answer, use
from rich.console import Console
from scripted import ScriptedTool, decision, make_agent

from configs.api_keys import ApiKeyError
from configs.base import fastest_precision
from envs.datasets.benchmarks import load_benchmark
from envs.datasets.game24 import load_game24, of_split
from envs.types import Task, ToolResult, ToolUnavailableError
from learner.checkpoint import CheckpointError, write_manifest
from ray_jobs import attempts
from ray_jobs.attempts import Evaluator, Wanted
from ray_jobs.evaluate import (
    EvaluationRequest,
    beyond_search,
    evaluation_items,
    report_evaluation,
    run_evaluation,
)
from ray_jobs.evaluation_folder import EvaluationError, read_evaluation
from ray_jobs.run.folder import RunFolder
from rollout.engines.engine import BackendError, EngineError
from rollout.records import read_records
from rollout.types import SERVED_VERSION
from tests.changed import replace

SAMPLE = Path(__file__).parents[1] / "envs" / "benchmark_sample"
KENYA = "What is the capital of the country where Mount Kenya stands? Nairobi."
ALL = ("bamboogle", "2wiki", "hotpotqa", "musique", "gaia", "aime24", "amc23", "game24", "gpqa", "medqa")


def request_for(tmp_path, *benchmarks, **changes):
    out = tmp_path / "out"
    return EvaluationRequest(**{"benchmarks": benchmarks, "data": SAMPLE, "whole": False, "out": out} | changes)


def summary_of(tmp_path):
    return json.loads((tmp_path / "out" / "summary.json").read_text())


def words_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.read_text().partition("</style>")[2]))


def test_all_ten_benchmarks_are_scored_by_their_own_scorers(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(lambda task, seed: right_answer(task)))
    page = run_evaluation(config_for(tmp_path), request_for(tmp_path, *ALL))
    summary = summary_of(tmp_path)
    assert {name: row["solve_rate"] for name, row in summary["benchmarks"].items()} == dict.fromkeys(ALL, 1.0)
    assert summary["num_items"] == 20
    # Wilson, 2 of 2: 1 / (1 + 1.96^2 / 2).
    assert summary["benchmarks"]["gaia"]["solve_rate_ci95"] == pytest.approx([0.342, 1.0], abs=1e-3)
    words = words_of(page)
    assert "100.0% of 20 items, one try each" in words
    assert "GPQA Diamond 2 100.0%" in words
    assert "2 of 125 items" in words


def test_held_out_tasks_are_not_shown_as_the_benchmark_of_their_name(tmp_path, monkeypatch):
    """Regression: generated hands were "Game of 24, 50 of 1362 items"."""
    use(monkeypatch, ScriptedSolver(lambda task, seed: "no"))
    config = config_for(tmp_path, "evaluation.mix={game24=1}", "evaluation.num_tasks=5")
    words = words_of(run_evaluation(config, request_for(tmp_path)))
    assert "game24 5 0.0%" in words
    assert "Game of 24" not in words
    assert "of 1362 items" not in words


def test_an_evaluation_of_an_earlier_release_is_shown_by_the_plain_names(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(lambda task, seed: right_answer(task)))
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
    path = tmp_path / "out" / "evaluation.json"
    facts = json.loads(path.read_text())
    assert facts.pop("benchmarks") == ["musique"]
    path.write_text(json.dumps(facts))
    assert "musique 2 100.0%" in words_of(report_evaluation(tmp_path / "out", Console()))


def test_failed_infrastructure_is_tried_again_and_then_is_unscored_by_name_and_not_wrong(tmp_path, monkeypatch):
    tries = {}

    def answer(task, seed):
        tries[task.id] = tries.get(task.id, 0) + 1
        if task.id == "amc23-0" and tries[task.id] < 3:
            return EngineError("gone")
        return right_answer(task) if task.id == "amc23-0" else EngineError("gone")

    use(monkeypatch, ScriptedSolver(answer))
    page = run_evaluation(config_for(tmp_path, "evaluation.max_attempts=3"), request_for(tmp_path, "amc23"))
    assert tries == {"amc23-0": 3, "amc23-1": 3}
    row = summary_of(tmp_path)["benchmarks"]["amc23"]
    assert (row["solve_rate"], row["num_items"], row["num_scored"], row["retried"]) == (1.0, 2, 1, 2)
    assert summary_of(tmp_path)["unscored"] == ["amc23/amc23-1/0"]
    assert "1 results are unscored and in no rate" in words_of(page)
    assert "failed at every attempt: amc23/amc23-1/0." in words_of(page)
    rewards = {row["task_id"]: row["reward"] for row in read_records(tmp_path / "out" / "items.jsonl")}
    assert rewards == {"amc23-0": 1.0, "amc23-1": None}


def test_what_a_scorer_cannot_tell_is_unscored_and_nobody_says_that_anything_failed(tmp_path, monkeypatch, capsys):
    def answer(task, seed):
        number = int(task.id.split("-")[-1])
        return {0: "who knows", 1: EngineError("gone")}.get(number, task.answer)

    config = config_for(tmp_path, "evaluation.num_tasks=4", "envs.mix={lookup=1}", *HESITANT)
    unknown, gone = (f"lookup/lookup-eval-1000000-{number}/0" for number in range(2))
    use(monkeypatch, ScriptedSolver(answer))
    page = run_evaluation(config, EvaluationRequest(out=tmp_path / "out"))
    summary = summary_of(tmp_path)
    row = summary["benchmarks"]["lookup"]
    assert (summary["solve_rate"], summary["num_scored"], set(summary["unscored"])) == (1.0, 2, {unknown, gone})
    assert (summary["infrastructure_failures"], summary["undecided"]) == (1, 1)
    assert (row["infrastructure_failures"], row["undecided"]) == (1, 1)
    why = (
        f"because the engine or a tool failed at every attempt: {gone}; "
        f"because a scorer of one's own could not tell: {unknown}"
    )
    said, words = " ".join(capsys.readouterr().out.split()), html.unescape(words_of(page))
    assert f"2 of 4 results are unscored and in no rate, {why}; the same command tries again what failed" in said
    assert f"2 results are unscored and in no rate, {why}. The same command tries again what failed." in words
    # Items, solved, interval, no answer, unscored.
    assert re.search(r"lookup 2 100\.0% 34\.2 to 100\.0% 0 2 ", words)


def test_paths_and_ids_are_printed_as_they_stand(tmp_path, monkeypatch, capsys):
    rows = [{"id": f"[/b]{number}", "question": f"{number}?", "answer": f"{number}"} for number in range(8)]
    use(monkeypatch, ScriptedSolver(lambda task, seed: EngineError("gone") if task.answer < "4" else task.answer))
    monkeypatch.setattr("ray_jobs.evaluate.evaluation_items", lambda *_: own_tasks(rows))
    run_evaluation(config_for(tmp_path), EvaluationRequest(out=tmp_path / "out[b]"))
    said = "".join(capsys.readouterr().out.split())
    assert "own_text/[/b]0/0" in said
    assert f"report:{tmp_path}/out[b]/report.html" in said


def own_tasks(rows):
    return [Task(id=row["id"], dataset="own_text", question=row["question"], answer=row["answer"]) for row in rows]


async def test_an_answer_that_is_long_in_scoring_holds_no_other_attempt_up(monkeypatch):
    tasks = [Task(id=name, dataset="own_text", question="?", answer="1") for name in ("long", "short")]
    short_is_scored = threading.Event()

    def score(task, answer, turns):
        if task.id == "short":
            short_is_scored.set()
        return float(short_is_scored.wait(60))

    monkeypatch.setattr(attempts, "score_answer", score)
    evaluator = Evaluator(
        policy=ScriptedSolver(lambda task, seed: "1"), phase="evaluate", temperature=0.0, max_attempts=1
    )
    wanted = [Wanted(task=task, seed=0, trajectory_id=task.id, group_id=task.id) for task in tasks]
    rewards = {}
    await evaluator.evaluate(wanted, lambda row: rewards.update({row["task_id"]: row["reward"]}))
    assert rewards == {"long": 1.0, "short": 1.0}


def test_items_of_which_no_scorer_could_tell_anything_blame_no_engine(tmp_path, monkeypatch):
    config = config_for(tmp_path, "evaluation.num_tasks=2", "envs.mix={lookup=1}", *HESITANT)
    use(monkeypatch, ScriptedSolver(lambda task, seed: "who knows"))
    with pytest.raises(EvaluationError, match=r"none of the 2 items .* because a scorer of one's own .* another --out"):
        run_evaluation(config, EvaluationRequest(out=tmp_path / "out"))


def test_a_tool_that_breaks_once_costs_an_attempt_and_nothing_else(tmp_path, monkeypatch):
    results = [ToolUnavailableError("busy"), "Ada"]

    class FlakyToolSolver(ScriptedSolver):
        async def attempt(self, task, trajectory_id, *, group_id, **options):
            search = ScriptedTool("search", {"q": results.pop(0) if task.id == "musique-0" else "Ada"})
            agent = make_agent([decision("search", "q"), decision("answer", right_answer(task))], tools=[search])
            return await agent.run(task, trajectory_id=trajectory_id, group_id=group_id)

    use(monkeypatch, FlakyToolSolver(broken))
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
    assert summary_of(tmp_path)["solve_rate"] == 1.0
    attempts = {row["task_id"]: row["attempts"] for row in read_records(tmp_path / "out" / "items.jsonl")}
    assert attempts == {"musique-0": 2, "musique-1": 1}


def test_an_engine_that_always_fails_gives_no_rate_at_all(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(broken))
    with pytest.raises(EvaluationError, match="none of the 2 items could be scored"):
        run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
    assert not (tmp_path / "out" / "summary.json").exists()
    use(monkeypatch, ScriptedSolver(lambda task, seed: right_answer(task)))
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
    assert summary_of(tmp_path)["unscored"] == []


def test_a_benchmark_of_which_nothing_was_scored_has_no_rate_beside_others(tmp_path, monkeypatch, capsys):
    use(monkeypatch, ScriptedSolver(lambda task, seed: broken(task, seed) if task.dataset == "gaia" else "no"))
    page = run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique", "gaia"))
    summary = summary_of(tmp_path)
    assert [summary["benchmarks"][name]["solve_rate"] for name in ("musique", "gaia")] == [0.0, None]
    assert (summary["solve_rate"], summary["mean_over_benchmarks"], summary["num_scored"]) == (0.0, 0.0, 2)
    assert "not measured" in words_of(page)
    assert "2 of 4 results are unscored and in no rate" in " ".join(capsys.readouterr().out.split())


def test_item_that_is_done_is_not_run_again_but_a_failed_one_is(tmp_path, monkeypatch):
    config, request = config_for(tmp_path), request_for(tmp_path, "musique", "amc23")
    use(monkeypatch, ScriptedSolver(lambda task, seed: broken(task, seed) if task.id == "amc23-1" else "no"))
    run_evaluation(config, request)
    again = use(monkeypatch, ScriptedSolver(lambda task, seed: right_answer(task)))
    run_evaluation(config, request)
    assert [asked[1] for asked in again.asked] == ["amc23-1"]
    stored = read_evaluation(tmp_path / "out")
    assert len(stored.items) == 4
    assert {key.task_id: item.solved for key, item in stored.items.items()}["amc23-1"]
    finished = use(monkeypatch, ScriptedSolver(broken))
    run_evaluation(config, request)
    assert finished.asked == []


def test_evaluation_that_was_cut_off_in_a_line_goes_on(tmp_path, monkeypatch):
    config, request = config_for(tmp_path), request_for(tmp_path, "musique")
    use(monkeypatch, ScriptedSolver(lambda task, seed: right_answer(task)))
    run_evaluation(config, request)
    items = tmp_path / "out" / "items.jsonl"
    items.write_bytes(items.read_bytes()[:-20])
    with pytest.raises(EvaluationError, match="1 of 2 results; run the same command again"):
        read_evaluation(tmp_path / "out")
    again = use(monkeypatch, ScriptedSolver(lambda task, seed: right_answer(task)))
    run_evaluation(config, request)
    assert len(again.asked) == 1
    assert read_evaluation(tmp_path / "out").items.keys()


def test_error_that_no_item_survives_ends_the_command_and_keeps_what_is_done(tmp_path, monkeypatch):
    done = tmp_path / "out" / "items.jsonl"

    class FakeRefusedSolver(ScriptedSolver):
        async def attempt(self, task, trajectory_id, **options):
            if task.id == "musique-1":
                while not done.exists() or not read_records(done):  # noqa: ASYNC110 (nothing tells of it)
                    await asyncio.sleep(0.01)
                raise BackendError("the server refuses the key")
            return await super().attempt(task, trajectory_id, **options)

    use(monkeypatch, FakeRefusedSolver(lambda task, seed: right_answer(task)))
    with pytest.raises(BackendError, match="refuses the key"):
        run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
    assert [row["task_id"] for row in read_records(done)] == ["musique-0"]


def test_folder_of_another_policy_or_other_settings_is_refused(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(lambda task, seed: "no"))
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
    with pytest.raises(EvaluationError, match="with another sampling"):
        run_evaluation(config_for(tmp_path, "agent.max_steps=2"), request_for(tmp_path, "musique"))
    with pytest.raises(EvaluationError, match="with another items"):
        run_evaluation(config_for(tmp_path), request_for(tmp_path, "gaia"))
    changed = config_for(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(EvaluationError, match="with another policy"):
        run_evaluation(changed, request_for(tmp_path, "musique"))


def test_folder_of_a_training_run_is_left_as_it_is(tmp_path, monkeypatch):
    """Regression: the evaluation's summary.json took the place of the run's, which then passed for finished."""
    config, solver = config_for(tmp_path), use(monkeypatch, ScriptedSolver(lambda task, seed: "no"))
    with RunFolder.create(config) as run:
        run.write_summary({"solve_rate_after": 0.72})
    there = {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    with pytest.raises(EvaluationError, match=r"'.*/r' is the folder of a training run, .* another folder with --out"):
        run_evaluation(config, request_for(tmp_path, "musique", out=run.path))
    assert solver.asked == []
    assert {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()} == there


def test_seeds_are_tries_of_the_same_items_and_widen_no_interval(tmp_path, monkeypatch):
    solver = use(monkeypatch, ScriptedSolver(lambda task, seed: right_answer(task) if seed < 2 else "no"))
    config = config_for(tmp_path, "evaluation.temperature=0.7")
    run_evaluation(config, request_for(tmp_path, "musique", num_seeds=4))
    row = summary_of(tmp_path)["benchmarks"]["musique"]
    assert row["by_seed"] == [1.0, 1.0, 0.0, 0.0]
    assert (row["num_items"], row["num_results"], row["solve_rate"]) == (2, 8, 0.5)
    # Wilson over two items, one of which is solved on average: not over eight tries.
    assert row["solve_rate_ci95"] == pytest.approx([0.0945, 0.9055], abs=1e-4)
    assert {asked[2:] for asked in solver.asked} == {(seed, 0.7) for seed in range(4)}


def test_seeds_of_a_greedy_policy_are_refused(tmp_path):
    with pytest.raises(EvaluationError, match="copies of one another"):
        run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique", num_seeds=2))


def test_limit_takes_the_same_items_every_time_and_not_the_first_ones(tmp_path):
    config = config_for(tmp_path, "evaluation.num_tasks=60", "envs.mix={lookup=0.5, branch=0.5}")
    tasks = evaluation_items(config, EvaluationRequest(limit=10))
    assert [task.dataset for task in tasks].count("lookup") == 10
    assert len(tasks) == 20
    assert tasks == evaluation_items(config, EvaluationRequest(limit=10))
    assert tasks[:10] != evaluation_items(config, EvaluationRequest())[:10]


def test_file_that_is_missing_or_has_another_length_is_one_sentence(tmp_path):
    with pytest.raises(EvaluationError, match=r"needs the file .*gaia.jsonl"):
        evaluation_items(config_for(tmp_path), request_for(tmp_path, "gaia", data=tmp_path))
    with pytest.raises(EvaluationError, match="expected 127 items, found 2"):
        evaluation_items(config_for(tmp_path), request_for(tmp_path, "gaia", whole=True))
    with pytest.raises(EvaluationError, match="unknown benchmark 'mmlu'"):
        evaluation_items(config_for(tmp_path), request_for(tmp_path, "mmlu"))


def test_benchmark_whose_facts_no_tool_can_find_is_warned_of(tmp_path, monkeypatch, capsys):
    use(monkeypatch, ScriptedSolver(lambda task, seed: "no"))
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "bamboogle", "game24"))
    said = " ".join(capsys.readouterr().out.split())
    assert "bamboogle: no tool of this recipe finds facts of the world, and search=offline cannot answer this" in said
    assert "game24: no tool" not in said
    asked = ("bamboogle", "musique", "gaia", "aime24", "gpqa")
    assert beyond_search(config_for(tmp_path), asked) == ["bamboogle", "musique", "gaia"]
    own_agent = ("agent.function=mine:solve", "cold_start.num_demonstrations=0", "reward.credit=outcome")
    for settings in (("envs.search=tavily",), ('envs.actions=["wikipedia_search", "answer"]',), own_agent):
        assert beyond_search(config_for(tmp_path, *settings), asked) == []


def test_item_that_training_meets_is_left_out_and_that_is_said(tmp_path, capsys):
    hands = [[1, 1, 4, 6], [8, 6, 6, 4], [3, 3, 8, 8], [2, 3, 4, 6], [1, 5, 5, 5], [4, 4, 10, 10]]
    data = tmp_path / "data"
    data.mkdir()
    rows = [json.dumps({"id": f"h{n}", "numbers": hand}) + "\n" for n, hand in enumerate(hands)]
    (data / "gameof24.jsonl").write_text("".join(rows))
    request = EvaluationRequest(benchmarks=("game24",), data=data, whole=False)
    held_out = [task.id for task in of_split(load_game24(data / "gameof24.jsonl"), "eval")]
    assert 0 < len(held_out) < len(hands)

    assert len(evaluation_items(config_for(tmp_path), request)) == len(hands)
    assert capsys.readouterr().out == ""
    trained = config_for(tmp_path, "envs.mix={game24=1,lookup=1}")
    assert [task.id for task in evaluation_items(trained, request)] == held_out
    said = f"game24: {len(hands) - len(held_out)} of {len(hands)} items are left out, because training meets them"
    assert said in capsys.readouterr().out


def test_item_that_the_adapters_own_run_was_trained_on_is_left_out(tmp_path):
    asked = load_benchmark("musique", SAMPLE, whole=False)
    row = {"question": asked[0].question.upper() + " ?", "answer": "x", "split": "train"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row))
    run = RunFolder.create(config_for(tmp_path, "envs.mix={own_text=1}", f"envs.data_path={tmp_path}/mine.jsonl"))
    run.close()
    request = EvaluationRequest(benchmarks=("musique",), data=SAMPLE, whole=False, adapter=run.checkpoints / "v000001")
    assert evaluation_items(config_for(tmp_path), request) == asked[1:]
    (tmp_path / "mine.jsonl").unlink()
    with pytest.raises(EvaluationError, match="which items it has met cannot be told; put the file back"):
        evaluation_items(config_for(tmp_path), request)


@pytest.mark.parametrize("name", [name for name in ALL if name != "game24"])
def test_item_whose_question_training_asks_as_it_was_published_is_left_out(tmp_path, name):
    """Regression: only with the form of the answer, which a benchmark's reader adds, was it the same question."""
    row = json.loads((SAMPLE / f"{name}.jsonl").read_text().splitlines()[0])
    question = next(row[column] for column in ("question", "Question", "Problem") if column in row)
    (tmp_path / "mine.jsonl").write_text(json.dumps({"question": question, "answer": "x", "split": "train"}))
    config = config_for(tmp_path, "envs.mix={own_text=1}", f"envs.data_path={tmp_path}/mine.jsonl")
    asked = load_benchmark(name, SAMPLE, whole=False)
    request = EvaluationRequest(benchmarks=(name,), data=SAMPLE, whole=False)
    assert evaluation_items(config, request) == asked[1:]


def test_item_is_left_out_whose_question_training_asks_without_its_options(tmp_path):
    rows = [{"question": q, "answer": "C", "split": "train"} for q in ("Which organ makes insulin?", "Which vitamin?")]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_for(tmp_path, "envs.mix={own_text=1}", f"envs.data_path={tmp_path}/mine.jsonl")
    request = EvaluationRequest(benchmarks=("medqa",), data=SAMPLE, whole=False)
    assert [task.id for task in evaluation_items(config, request)] == ["medqa-0"]


def test_item_that_a_run_of_another_recipe_was_trained_on_is_left_out(tmp_path, monkeypatch):
    asked = load_benchmark("musique", SAMPLE, whole=False)
    rows = [{"question": one, "answer": "x", "split": "train"} for one in (asked[0].question, "Who else?")]
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tasks_of_another_recipe.py").write_text(f"def load():\n    return {rows}\n")
    datasets = "envs.datasets.mine.source=tasks_of_another_recipe:load"
    monkeypatch.setattr(sys, "path", [*sys.path])
    began = config_for(tmp_path, "envs.mix={mine=1}", datasets)
    run = RunFolder.create(began.model_copy(update={"code_path": str(tmp_path / "recipes")}))
    run.close()
    request = EvaluationRequest(benchmarks=("musique",), data=SAMPLE, whole=False, adapter=run.checkpoints / "v000001")
    assert evaluation_items(config_for(tmp_path), request) == asked[1:]


def test_an_adapter_of_another_scale_is_refused_and_leaves_no_folder(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(broken))
    run = RunFolder.create(config_for(tmp_path, "model.lora_alpha=64"))
    run.close()
    with pytest.raises(CheckpointError, match=r"was trained with model\.lora_alpha = 64\.0"):
        run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique", adapter=run.checkpoints / "v000001"))
    assert not (tmp_path / "out").exists()


def test_an_evaluation_of_an_adapter_does_not_go_on_with_another_scale(tmp_path, monkeypatch):
    checkpoint = checkpoint_in(tmp_path)
    use(monkeypatch, ScriptedSolver(lambda task, seed: "no"))
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique", adapter=checkpoint))
    with pytest.raises(EvaluationError, match="holds an evaluation with another policy"):
        run_evaluation(
            config_for(tmp_path, "model.lora_alpha=64"), request_for(tmp_path, "musique", adapter=checkpoint)
        )


def test_an_evaluation_that_names_no_scale_goes_on(tmp_path, monkeypatch):
    checkpoint = checkpoint_in(tmp_path)
    use(monkeypatch, ScriptedSolver(lambda task, seed: "no"))
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique", adapter=checkpoint))
    stored = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert stored["identity"]["policy"].pop("lora_alpha") == 32
    (tmp_path / "out" / "evaluation.json").write_text(json.dumps(stored))
    again = use(monkeypatch, ScriptedSolver(broken))
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique", adapter=checkpoint))
    assert again.asked == []


def checkpoint_in(tmp_path):
    """One that lies in no run."""
    folder = tmp_path / "v000001"
    folder.mkdir()
    (folder / "adapter.safetensors").write_bytes(b"adapter")
    write_manifest(folder, policy_version=1, step=1)
    return folder


def test_held_out_task_that_the_adapters_own_run_was_trained_on_is_left_out(tmp_path, capsys):
    questions = [f"Who is number {number}?" for number in range(3)]

    def recipe(name, met):
        """`met` are the questions that it trains on; it holds the others out."""
        rows = ({"question": q, "answer": "x", "split": "train" if q in met else "eval"} for q in questions)
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return config_for(tmp_path, "envs.mix={own_text=1}", f"envs.data_path={tmp_path / name}")

    run = RunFolder.create(recipe("theirs.jsonl", questions[:2]))
    run.close()
    mine = recipe("mine.jsonl", questions[:1])
    mine = mine.model_copy(update={"evaluation": mine.evaluation.model_copy(update={"num_tasks": 2})})
    assert {task.question for task in evaluation_items(mine, EvaluationRequest())} == set(questions[1:])
    kept = evaluation_items(mine, EvaluationRequest(adapter=run.checkpoints / "v000001"))
    assert [task.question for task in kept] == questions[2:]
    assert "own_text: 1 of 2 items are left out, because training meets them" in capsys.readouterr().out


def test_generated_tasks_are_evaluated_wherever_the_data_of_the_adapters_run_are(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"question": "Who?", "answer": "x", "split": "train"}')
    run = RunFolder.create(config_for(tmp_path, "envs.mix={own_text=1}", f"envs.data_path={tmp_path}/mine.jsonl"))
    run.close()
    (tmp_path / "mine.jsonl").unlink()
    config = config_for(tmp_path, "evaluation.num_tasks=5")
    assert len(evaluation_items(config, EvaluationRequest(adapter=run.checkpoints / "v000001"))) == 5


class FakeJudge:
    failures = Counter({"no connection": 2})

    def __init__(self, config):
        pass

    async def same(self, question, gold, answer):
        return {"the U.K.": True, "unclear": None}.get(answer, False)


def test_what_the_judge_accepts_is_counted_apart_and_what_it_lacks_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ray_jobs.evaluate.AnswerJudge", FakeJudge)
    answers = {"musique-0": "the U.K.", "musique-1": "unclear", "gaia-0": "24", "gaia-1": "no", "medqa-0": "D"}
    use(monkeypatch, ScriptedSolver(lambda task, seed: answers.get(task.id, "D")))
    config = config_for(tmp_path, "evaluation.judge={model='m'}")
    page = run_evaluation(config, request_for(tmp_path, "musique", "gaia", "medqa"))
    rows = summary_of(tmp_path)["benchmarks"]
    judged = {"asked": 2, "accepted": 1, "silent": 1, "solve_rate_with_judge": 0.5}
    assert (rows["musique"]["solve_rate"], rows["musique"]["judge"]) == (0.0, judged)
    assert rows["gaia"]["judge"] == {"asked": 1, "accepted": 0, "silent": 0, "solve_rate_with_judge": 0.5}
    # A letter has one right form: nobody is asked.
    assert rows["medqa"]["judge"] is None
    assert "A language model's word, apart" in words_of(page).replace("&#x27;", "'")
    assert "2 of the judge's votes are missing: no connection" in capsys.readouterr().out


def test_a_judge_that_accepts_nothing_leaves_the_rate_as_it_is(tmp_path, monkeypatch):
    """Regression: its rate was over results, and below the exact one where an item had fewer scored seeds."""
    monkeypatch.setattr("ray_jobs.evaluate.AnswerJudge", FakeJudge)
    tried = {("musique-0", 0): "right", ("musique-0", 1): "no", ("musique-1", 0): "right"}

    def answer_of(task, seed):
        answer = tried.get((task.id, seed))
        return broken(task, seed) if answer is None else right_answer(task) if answer == "right" else answer

    use(monkeypatch, ScriptedSolver(answer_of))
    config = config_for(tmp_path, "evaluation.judge={model='m'}", "evaluation.temperature=0.7")
    run_evaluation(config, request_for(tmp_path, "musique", num_seeds=2))
    row = summary_of(tmp_path)["benchmarks"]["musique"]
    assert (row["solve_rate"], row["judge"]["solve_rate_with_judge"]) == (0.75, 0.75)


def test_the_judge_is_asked_about_questions_of_ones_own(tmp_path, monkeypatch):
    """Regression: it was accepted, its key was demanded, and it was asked about benchmarks only."""
    rows = [{"question": f"{word} country?", "answer": "Great Britain", "split": "eval"} for word in ("Which", "What")]
    rows.append({"question": "Whose country?", "answer": "France", "split": "train"})
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("ray_jobs.evaluate.AnswerJudge", FakeJudge)
    use(monkeypatch, ScriptedSolver(lambda task, seed: "the U.K." if task.id == "own_text-1" else "France"))
    own = ("envs.mix={own_text=1}", f"envs.data_path={tmp_path / 'own.jsonl'}", "evaluation.num_tasks=2")
    run_evaluation(config_for(tmp_path, *own, "evaluation.judge={model='m'}"), EvaluationRequest(out=tmp_path / "out"))
    row = summary_of(tmp_path)["benchmarks"]["own_text"]
    judged = {"asked": 2, "accepted": 1, "silent": 0, "solve_rate_with_judge": 0.5}
    assert (row["solve_rate"], row["judge"]) == (0.0, judged)


def test_a_blank_answer_is_none_and_nobody_judges_it(tmp_path, monkeypatch):
    class BlankSolver(ScriptedSolver):
        async def attempt(self, task, trajectory_id, **options):
            return replace(await super().attempt(task, trajectory_id, **options), answer="")

    monkeypatch.setattr("ray_jobs.evaluate.AnswerJudge", FakeJudge)
    use(monkeypatch, BlankSolver(lambda task, seed: "x"))
    run_evaluation(config_for(tmp_path, "evaluation.judge={model='m'}"), request_for(tmp_path, "musique"))
    row = summary_of(tmp_path)["benchmarks"]["musique"]
    assert (row["num_scored"], row["no_answer"], row["solve_rate"], row["f1"], row["judge"]) == (2, 2, 0.0, 0.0, None)


def test_identity_proves_what_was_evaluated(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(lambda task, seed: "no"))
    page = run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
    identity = json.loads((tmp_path / "out" / "evaluation.json").read_text())["identity"]
    assert re.fullmatch("[0-9a-f]{64}", identity["policy"]["model_digest"])
    assert re.fullmatch("[0-9a-f]{64}", identity["verifier"]["code"])
    assert identity["quantisation"]["weights"] == fastest_precision("cpu")
    assert identity["items"]["musique"]["count"] == 2
    words = words_of(page)
    assert "Verifier and generator are rules: they asked no model." in words
    assert f"items of MuSiQue 2, {identity['items']['musique']['digest'][:12]}" in words


@pytest.mark.parametrize(
    ("version", "name"), [(-1, "the untouched model"), (0, "policy version 0"), (SERVED_VERSION, "the served model")]
)
def test_page_names_who_answered_the_planners_calls(tmp_path, monkeypatch, version, name):
    use(monkeypatch, ScriptedSolver(lambda task, seed: "no"))
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
    path = tmp_path / "out" / "items.jsonl"
    rows = list(read_records(path))
    for turn in (turn for row in rows for turn in row["turns"] if turn["role"] == "planner"):
        turn["policy_version"] = version
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"The planner's calls were answered by {name}." in words_of(report_evaluation(tmp_path / "out", Console()))


def test_page_shows_hostile_text_as_text(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(lambda task, seed: "<script>alert(1)</script>"))
    page = run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique")).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_judge_without_its_key_ends_the_command_before_anything_is_run(tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    solver = use(monkeypatch, ScriptedSolver(broken))
    with pytest.raises(ApiKeyError, match="names JUDGE_KEY, which is not set"):
        run_evaluation(
            config_for(tmp_path, "evaluation.judge={model='m', api_key_env='JUDGE_KEY'}"),
            request_for(tmp_path, "musique"),
        )
    assert solver.asked == []


def test_question_that_a_tool_brought_in_is_reported_as_a_leak(tmp_path, monkeypatch, capsys):
    run_evaluation_with_search(tmp_path, monkeypatch)
    leaks = summary_of(tmp_path)["benchmarks"]["musique"]["leaks"]
    assert leaks == {"searched": 2, "leaked": ["musique/musique-0/0"], "share": 0.5}
    assert "MuSiQue 2 1 50.0%" in words_of(tmp_path / "out" / "report.html")
    said = " ".join(capsys.readouterr().out.split())
    assert "leakage audit: 1 of 2 results are leaked, most of the question was found in what the tools" in said


def test_an_error_that_quotes_the_question_is_no_leak(tmp_path, monkeypatch):
    run_evaluation_with_search(tmp_path, monkeypatch, ToolResult(text=KENYA, error="tool_error"))
    leaks = summary_of(tmp_path)["benchmarks"]["musique"]["leaks"]
    assert leaks == {"searched": 1, "leaked": [], "share": 0.0}


def run_evaluation_with_search(tmp_path, monkeypatch, first=KENYA):
    """What is found for the first item holds its question."""
    found = {
        "musique-0": first,
        "musique-1": "Bern is a city on the river Aare.",
    }

    class SearchingSolver(ScriptedSolver):
        async def attempt(self, task, trajectory_id, **options):
            search = ScriptedTool("search", {"q": found[task.id]})
            texts = [decision("search", "q"), decision("answer", "x")]
            return await make_agent(texts, tools=[search]).run(task, trajectory_id=trajectory_id, group_id="g")

    use(monkeypatch, SearchingSolver(broken))
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
