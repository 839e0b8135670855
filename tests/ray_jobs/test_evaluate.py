import json
from collections import Counter

import pytest
from evaluating import SAMPLE, ScriptedSolver, broken, config_for, evaluate, right_answer, use
from scripted import ScriptedTool, decision, make_agent

from configs.errors import UserError
from envs.datasets.benchmarks import load_benchmark
from envs.types import ToolResult
from ray_jobs.evaluate import evaluation_items
from ray_jobs.evaluation import read_evaluation
from ray_jobs.run.folder import RunFolder
from rollout.engines.engine import EngineError
from rollout.files import read_records

KENYA = "What is the capital of the country where Mount Kenya stands? Nairobi."
ALL = ("bamboogle", "2wiki", "hotpotqa", "musique", "gaia", "aime24", "amc23", "game24", "gpqa", "medqa")


def results_of(config, tmp_path, *benchmarks, seeds=1):
    """Evaluate, and return the summary."""
    evaluate(config, tmp_path / "out", *benchmarks, seeds=seeds)
    return json.loads((tmp_path / "out" / "summary.json").read_text())


def solves(task, seed):
    return right_answer(task)


def test_all_ten_benchmarks_have_their_scorers(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(solves))
    summary = results_of(config_for(tmp_path), tmp_path, *ALL)
    assert {name: row["solve_rate"] for name, row in summary["benchmarks"].items()} == dict.fromkeys(ALL, 1.0)
    assert summary["num_items"] == 20
    # Wilson, 2 of 2: 1 / (1 + 1.96^2 / 2).
    assert summary["benchmarks"]["gaia"]["solve_rate_ci95"] == pytest.approx([0.342, 1.0], abs=1e-3)
    assert "GPQA Diamond" in (tmp_path / "out" / "report.html").read_text()


def test_failed_infrastructure_is_retried_and_then_unscored(tmp_path, monkeypatch):
    tries = Counter()

    def answer(task, seed):
        tries[task.id] += 1
        return right_answer(task) if task.id == "amc23-0" and tries[task.id] == 3 else EngineError("gone")

    use(monkeypatch, ScriptedSolver(answer))
    summary = results_of(config_for(tmp_path), tmp_path, "amc23")
    assert tries == {"amc23-0": 3, "amc23-1": 3}
    row = summary["benchmarks"]["amc23"]
    assert (row["solve_rate"], row["num_items"], row["num_scored"]) == (1.0, 2, 1)
    assert summary["unscored"] == ["amc23/amc23-1/0"]
    rewards = {row["task_id"]: row["reward"] for row in read_records(tmp_path / "out" / "items.jsonl")}
    assert rewards == {"amc23-0": 1.0, "amc23-1": None}


def test_only_missing_and_failed_items_are_repeated(tmp_path, monkeypatch):
    config, out = config_for(tmp_path), tmp_path / "out"

    def repeated(answer_of):
        solver = use(monkeypatch, ScriptedSolver(answer_of))
        evaluate(config, out, "musique", "amc23")
        return [task_id for _, task_id, *_ in solver.asked]

    first = repeated(lambda task, seed: broken(task, seed) if task.id == "amc23-1" else "no")
    assert first.count("amc23-1") == 3
    assert repeated(solves) == ["amc23-1"]
    stored = read_evaluation(out)
    assert len(stored.items) == 4
    assert {item.task_id: item.solved for item in stored.items}["amc23-1"]
    assert repeated(broken) == []
    # A kill within a line costs that line.
    items = out / "items.jsonl"
    items.write_bytes(items.read_bytes()[:-20])
    assert repeated(solves) == ["amc23-1"]
    items.write_bytes(items.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(UserError):
        read_evaluation(out)


def test_folder_of_another_policy_or_other_settings_is_rejected(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(lambda task, seed: "no"))
    evaluate(config_for(tmp_path), tmp_path / "out", "musique")
    with pytest.raises(UserError, match="agent"):
        evaluate(config_for(tmp_path, "agent.max_steps=2"), tmp_path / "out", "musique")
    with pytest.raises(UserError, match="items"):
        evaluate(config_for(tmp_path), tmp_path / "out", "gaia")
    changed = config_for(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(UserError, match="policy"):
        evaluate(changed, tmp_path / "out", "musique")


def test_seeds_repeat_items_and_do_not_narrow_the_interval(tmp_path, monkeypatch):
    solver = use(monkeypatch, ScriptedSolver(lambda task, seed: right_answer(task) if seed < 2 else "no"))
    config = config_for(tmp_path, "evaluation.temperature=0.7")
    row = results_of(config, tmp_path, "musique", seeds=4)["benchmarks"]["musique"]
    assert row["by_seed"] == [1.0, 1.0, 0.0, 0.0]
    assert (row["num_items"], row["solve_rate"]) == (2, 0.5)
    # Wilson over two items, one of which is solved on average: not over eight tries.
    assert row["solve_rate_ci95"] == pytest.approx([0.0945, 0.9055], abs=1e-4)
    assert {asked[2:] for asked in solver.asked} == {(seed, 0.7) for seed in range(4)}


def test_training_tasks_of_the_adapters_run_are_left_out(tmp_path):
    asked = load_benchmark("musique", SAMPLE, whole=False)
    row = {"question": asked[0].question.upper() + " ?", "answer": "x", "split": "train"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row))
    mine = ("envs.mix={mine=1}", f"envs.datasets.mine.source={tmp_path}/mine.jsonl")
    with RunFolder.open(config_for(tmp_path, *mine)) as run:
        adapter = run.checkpoints / "v000001"

    def items():
        return evaluation_items(config_for(tmp_path), adapter=adapter, benchmarks=["musique"], data=SAMPLE, whole=False)

    assert items() == asked[1:]
    (tmp_path / "mine.jsonl").unlink()
    with pytest.raises(UserError, match=r"envs\.datasets\.mine\.source"):
        items()
    # Generated tasks need no look at that file.
    assert len(evaluation_items(config_for(tmp_path, "evaluation.num_tasks=5"), adapter=adapter)) == 5


@pytest.mark.parametrize("name", [name for name in ALL if name != "game24"])
def test_training_task_with_the_published_question_is_left_out(tmp_path, name):
    row = json.loads((SAMPLE / f"{name}.jsonl").read_text().splitlines()[0])
    question = next(row[column] for column in ("question", "Question", "Problem") if column in row)
    (tmp_path / "mine.jsonl").write_text(json.dumps({"question": question, "answer": "x", "split": "train"}))
    config = config_for(tmp_path, "envs.mix={mine=1}", f"envs.datasets.mine.source={tmp_path}/mine.jsonl")
    asked = load_benchmark(name, SAMPLE, whole=False)
    assert evaluation_items(config, benchmarks=[name], data=SAMPLE, whole=False) == asked[1:]


class FakeJudge:
    failures = Counter({"no connection": 2})

    def __init__(self, config):
        pass

    async def same(self, question, gold, answer):
        return {"the U.K.": True, "unclear": None}.get(answer, False)


def test_verdicts_of_the_judge_are_counted_apart(tmp_path, monkeypatch):
    monkeypatch.setattr("ray_jobs.evaluate.AnswerJudge", FakeJudge)
    answers = {"musique-0": "the U.K.", "musique-1": "unclear", "gaia-0": "24", "gaia-1": "no", "medqa-0": "D"}
    use(monkeypatch, ScriptedSolver(lambda task, seed: answers.get(task.id, "D")))
    config = config_for(tmp_path, "evaluation.judge={model='m'}")
    rows = results_of(config, tmp_path, "musique", "gaia", "medqa")["benchmarks"]
    judged = {"asked": 2, "accepted": 1, "silent": 1, "solve_rate_with_judge": 0.5}
    assert (rows["musique"]["solve_rate"], rows["musique"]["judge"]) == (0.0, judged)
    assert rows["gaia"]["judge"] == {"asked": 1, "accepted": 0, "silent": 0, "solve_rate_with_judge": 0.5}
    # A letter has one right form.
    assert rows["medqa"]["judge"] is None


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (KENYA, {"searched": 2, "leaked": ["musique/musique-0/0"], "share": 0.5}),
        (ToolResult(text=KENYA, error="tool_error"), {"searched": 1, "leaked": [], "share": 0.0}),
    ],
)
def test_retrieved_question_is_a_leak_and_a_quoting_error_is_not(tmp_path, monkeypatch, first, expected):
    results = {"musique-0": first, "musique-1": "Bern is a city on the river Aare."}

    class SearchingSolver(ScriptedSolver):
        async def attempt(self, task, trajectory_id, **options):
            search = ScriptedTool("search", {"q": results[task.id]})
            texts = [decision("search", "q"), decision("answer", "x")]
            return await make_agent(texts, tools=[search]).run(task, trajectory_id=trajectory_id, group_id="g")

    use(monkeypatch, SearchingSolver(broken))
    assert results_of(config_for(tmp_path), tmp_path, "musique")["benchmarks"]["musique"]["leaks"] == expected
