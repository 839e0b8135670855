import asyncio
import json
import threading
from collections import Counter
from pathlib import Path

import pytest
from evaluating import HESITANT, ScriptedSolver, broken, config_for, right_answer, use
from scripted import ScriptedTool, decision, make_agent

from configs.api_keys import ApiKeyError
from configs.errors import UserError
from envs.datasets.benchmarks import load_benchmark
from envs.datasets.game24 import load_game24, of_split
from envs.types import Task, ToolResult, ToolUnavailableError
from learner.checkpoint import write_manifest
from ray_jobs import held_out
from ray_jobs.evaluate import EvaluationRequest, beyond_search, evaluation_items, run_evaluation
from ray_jobs.evaluation_folder import EvaluationError, read_evaluation
from ray_jobs.held_out import Evaluator, Wanted
from ray_jobs.run.folder import RunFolder
from rollout.engines.engine import BackendError, EngineError
from rollout.records import read_records
from tests.changed import replace

SAMPLE = Path(__file__).parents[1] / "envs" / "benchmark_sample"
KENYA = "What is the capital of the country where Mount Kenya stands? Nairobi."
ALL = ("bamboogle", "2wiki", "hotpotqa", "musique", "gaia", "aime24", "amc23", "game24", "gpqa", "medqa")


def request_for(tmp_path, *benchmarks, **changes):
    out = tmp_path / "out"
    return EvaluationRequest(**{"benchmarks": benchmarks, "data": SAMPLE, "whole": False, "out": out} | changes)


def summary_of(tmp_path):
    return json.loads((tmp_path / "out" / "summary.json").read_text())


def solves(task, seed):
    return right_answer(task)


def test_all_ten_benchmarks_have_their_scorers(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(solves))
    page = run_evaluation(config_for(tmp_path), request_for(tmp_path, *ALL))
    summary = summary_of(tmp_path)
    assert {name: row["solve_rate"] for name, row in summary["benchmarks"].items()} == dict.fromkeys(ALL, 1.0)
    assert summary["num_items"] == 20
    # Wilson, 2 of 2: 1 / (1 + 1.96^2 / 2).
    assert summary["benchmarks"]["gaia"]["solve_rate_ci95"] == pytest.approx([0.342, 1.0], abs=1e-3)
    assert "GPQA Diamond" in page.read_text()


def test_failed_infrastructure_is_retried_and_then_unscored(tmp_path, monkeypatch):
    tries = Counter()

    def answer(task, seed):
        tries[task.id] += 1
        return right_answer(task) if task.id == "amc23-0" and tries[task.id] == 3 else EngineError("gone")

    use(monkeypatch, ScriptedSolver(answer))
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "amc23"))
    assert tries == {"amc23-0": 3, "amc23-1": 3}
    row = summary_of(tmp_path)["benchmarks"]["amc23"]
    assert (row["solve_rate"], row["num_items"], row["num_scored"], row["retried"]) == (1.0, 2, 1, 2)
    assert summary_of(tmp_path)["unscored"] == ["amc23/amc23-1/0"]
    rewards = {row["task_id"]: row["reward"] for row in read_records(tmp_path / "out" / "items.jsonl")}
    assert rewards == {"amc23-0": 1.0, "amc23-1": None}


def test_undecided_and_broken_items_are_counted_apart(tmp_path, monkeypatch):
    def answer(task, seed):
        return {0: "unclear", 1: EngineError("gone")}.get(int(task.id.split("-")[-1]), task.answer)

    config = config_for(tmp_path, "evaluation.num_tasks=4", "envs.mix={lookup=1}", *HESITANT)
    unscored = {f"lookup/lookup-eval-1000000-{number}/0" for number in range(2)}
    use(monkeypatch, ScriptedSolver(answer))
    run_evaluation(config, EvaluationRequest(out=tmp_path / "out"))
    summary = summary_of(tmp_path)
    row = summary["benchmarks"]["lookup"]
    assert (summary["solve_rate"], summary["num_scored"], set(summary["unscored"])) == (1.0, 2, unscored)
    assert (summary["infrastructure_failures"], summary["undecided"]) == (1, 1)
    assert (row["infrastructure_failures"], row["undecided"]) == (1, 1)


def test_paths_and_ids_with_brackets_are_printed(tmp_path, monkeypatch, capsys):
    tasks = [Task(id=f"[/b]{n}", dataset="own_text", question=f"{n}?", answer=f"{n}") for n in range(8)]
    use(monkeypatch, ScriptedSolver(lambda task, seed: EngineError("gone") if task.answer < "4" else task.answer))
    monkeypatch.setattr("ray_jobs.evaluate.evaluation_items", lambda *_: tasks)
    run_evaluation(config_for(tmp_path), EvaluationRequest(out=tmp_path / "out[b]"))
    printed = "".join(capsys.readouterr().out.split())
    assert "own_text/[/b]0/0" in printed
    assert f"{tmp_path}/out[b]/report.html" in printed


async def test_slow_scorer_does_not_block_other_attempts(monkeypatch):
    tasks = [Task(id=name, dataset="own_text", question="?", answer="1") for name in ("long", "short")]
    short_is_scored = threading.Event()

    def score(task, answer, turns):
        if task.id == "short":
            short_is_scored.set()
        return float(short_is_scored.wait(60))

    monkeypatch.setattr(held_out, "score_answer", score)
    policy = ScriptedSolver(lambda task, seed: "1")
    evaluator = Evaluator(policy=policy, phase="evaluate", temperature=0.0, max_attempts=1)
    wanted = [Wanted(task=task, seed=0, trajectory_id=task.id, group_id=task.id) for task in tasks]
    rewards = {}
    await evaluator.evaluate(wanted, lambda row: rewards.update({row["task_id"]: row["reward"]}))
    assert rewards == {"long": 1.0, "short": 1.0}


def test_tool_that_breaks_once_costs_one_attempt(tmp_path, monkeypatch):
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


def test_evaluation_without_a_scored_item_has_no_summary(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(broken))
    with pytest.raises(EvaluationError):
        run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
    assert not (tmp_path / "out" / "summary.json").exists()
    use(monkeypatch, ScriptedSolver(solves))
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
    assert summary_of(tmp_path)["unscored"] == []


def test_only_missing_and_failed_items_are_repeated(tmp_path, monkeypatch):
    config, request = config_for(tmp_path), request_for(tmp_path, "musique", "amc23")
    use(monkeypatch, ScriptedSolver(lambda task, seed: broken(task, seed) if task.id == "amc23-1" else "no"))
    run_evaluation(config, request)
    again = use(monkeypatch, ScriptedSolver(solves))
    run_evaluation(config, request)
    assert [asked[1] for asked in again.asked] == ["amc23-1"]
    stored = read_evaluation(tmp_path / "out")
    assert len(stored.items) == 4
    assert {item.key.task_id: item.solved for item in stored.items}["amc23-1"]
    finished = use(monkeypatch, ScriptedSolver(broken))
    run_evaluation(config, request)
    assert finished.asked == []


def test_evaluation_that_was_killed_within_a_line_continues(tmp_path, monkeypatch):
    config, request = config_for(tmp_path), request_for(tmp_path, "musique")
    use(monkeypatch, ScriptedSolver(solves))
    run_evaluation(config, request)
    items = tmp_path / "out" / "items.jsonl"
    items.write_bytes(items.read_bytes()[:-20])
    with pytest.raises(EvaluationError):
        read_evaluation(tmp_path / "out")
    again = use(monkeypatch, ScriptedSolver(solves))
    run_evaluation(config, request)
    assert len(again.asked) == 1
    assert len(read_evaluation(tmp_path / "out").items) == 2


def test_backend_error_ends_the_command_and_keeps_finished_items(tmp_path, monkeypatch):
    done = tmp_path / "out" / "items.jsonl"

    class RefusedSolver(ScriptedSolver):
        async def attempt(self, task, trajectory_id, **options):
            if task.id == "musique-1":
                while not done.exists() or not read_records(done):  # noqa: ASYNC110 (no event reports it)
                    await asyncio.sleep(0.01)
                raise BackendError("the server refuses the key")
            return await super().attempt(task, trajectory_id, **options)

    use(monkeypatch, RefusedSolver(solves))
    with pytest.raises(BackendError):
        run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
    assert [row["task_id"] for row in read_records(done)] == ["musique-0"]


def test_folder_of_another_policy_or_other_settings_is_rejected(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(lambda task, seed: "no"))
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
    with pytest.raises(EvaluationError, match="agent"):
        run_evaluation(config_for(tmp_path, "agent.max_steps=2"), request_for(tmp_path, "musique"))
    with pytest.raises(EvaluationError, match="items"):
        run_evaluation(config_for(tmp_path), request_for(tmp_path, "gaia"))
    changed = config_for(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(EvaluationError, match="policy"):
        run_evaluation(changed, request_for(tmp_path, "musique"))


def test_folder_of_another_schema_is_rejected(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(solves))
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
    path = tmp_path / "out" / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 1}))
    with pytest.raises(EvaluationError, match="schema 1"):
        read_evaluation(tmp_path / "out")


def test_folder_of_a_training_run_is_not_overwritten(tmp_path, monkeypatch):
    config, solver = config_for(tmp_path), use(monkeypatch, ScriptedSolver(lambda task, seed: "no"))
    with RunFolder.create(config) as run:
        run.write_summary({"solve_rate_after": 0.72})
    files = {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    with pytest.raises(EvaluationError, match="--out"):
        run_evaluation(config, request_for(tmp_path, "musique", out=run.path))
    assert solver.asked == []
    assert {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()} == files


def test_seeds_repeat_items_and_do_not_narrow_the_interval(tmp_path, monkeypatch):
    solver = use(monkeypatch, ScriptedSolver(lambda task, seed: right_answer(task) if seed < 2 else "no"))
    config = config_for(tmp_path, "evaluation.temperature=0.7")
    run_evaluation(config, request_for(tmp_path, "musique", num_seeds=4))
    row = summary_of(tmp_path)["benchmarks"]["musique"]
    assert row["by_seed"] == [1.0, 1.0, 0.0, 0.0]
    assert (row["num_items"], row["num_results"], row["solve_rate"]) == (2, 8, 0.5)
    # Wilson over two items, one of which is solved on average: not over eight tries.
    assert row["solve_rate_ci95"] == pytest.approx([0.0945, 0.9055], abs=1e-4)
    assert {asked[2:] for asked in solver.asked} == {(seed, 0.7) for seed in range(4)}


def test_seeds_of_a_greedy_policy_are_rejected(tmp_path):
    with pytest.raises(EvaluationError, match=r"evaluation\.temperature"):
        run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique", num_seeds=2))


def test_limit_samples_the_same_items_every_time(tmp_path):
    config = config_for(tmp_path, "evaluation.num_tasks=60", "envs.mix={lookup=0.5, branch=0.5}")
    tasks = evaluation_items(config, EvaluationRequest(limit=10))
    assert [task.dataset for task in tasks].count("lookup") == 10
    assert len(tasks) == 20
    assert tasks == evaluation_items(config, EvaluationRequest(limit=10))
    assert tasks[:10] != evaluation_items(config, EvaluationRequest())[:10]


@pytest.mark.parametrize(
    ("name", "changes"), [("gaia", {"data": Path("/nonexistent")}), ("gaia", {"whole": True}), ("mmlu", {})]
)
def test_missing_or_incomplete_benchmark_is_rejected(tmp_path, name, changes):
    with pytest.raises(EvaluationError):
        evaluation_items(config_for(tmp_path), request_for(tmp_path, name, **changes))


def test_benchmarks_beyond_offline_search(tmp_path):
    asked = ("bamboogle", "musique", "gaia", "aime24", "gpqa")
    assert beyond_search(config_for(tmp_path), asked) == ["bamboogle", "musique", "gaia"]
    custom_agent = ("agent.function=mine:solve", "cold_start.num_demonstrations=0", "reward.credit=outcome")
    for settings in (("envs.search=tavily",), ('envs.actions=["wikipedia_search", "answer"]',), custom_agent):
        assert beyond_search(config_for(tmp_path, *settings), asked) == []


def test_training_hands_of_game24_are_left_out(tmp_path):
    hands = [[1, 1, 4, 6], [8, 6, 6, 4], [3, 3, 8, 8], [2, 3, 4, 6], [1, 5, 5, 5], [4, 4, 10, 10]]
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"id": f"h{n}", "numbers": hand}) + "\n" for n, hand in enumerate(hands)]
    (tmp_path / "data" / "gameof24.jsonl").write_text("".join(rows))
    request = EvaluationRequest(benchmarks=("game24",), data=tmp_path / "data", whole=False)
    kept = [task.id for task in of_split(load_game24(tmp_path / "data" / "gameof24.jsonl"), "eval")]
    assert 0 < len(kept) < len(hands)
    assert len(evaluation_items(config_for(tmp_path), request)) == len(hands)
    trained = config_for(tmp_path, "envs.mix={game24=1,lookup=1}")
    assert [task.id for task in evaluation_items(trained, request)] == kept


def trained_run(config):
    """Create the folder of a run, and return the place of a checkpoint in it."""
    run = RunFolder.create(config)
    run.close()
    return run.checkpoints / "v000001"


def test_training_tasks_of_the_adapters_run_are_left_out(tmp_path):
    asked = load_benchmark("musique", SAMPLE, whole=False)
    row = {"question": asked[0].question.upper() + " ?", "answer": "x", "split": "train"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row))
    adapter = trained_run(config_for(tmp_path, "envs.mix={own_text=1}", f"envs.data_path={tmp_path}/mine.jsonl"))
    request = request_for(tmp_path, "musique", adapter=adapter)
    assert evaluation_items(config_for(tmp_path), request) == asked[1:]
    (tmp_path / "mine.jsonl").unlink()
    with pytest.raises(EvaluationError, match=r"envs\.data_path"):
        evaluation_items(config_for(tmp_path), request)
    # Generated tasks need no look at that file.
    config = config_for(tmp_path, "evaluation.num_tasks=5")
    assert len(evaluation_items(config, EvaluationRequest(adapter=adapter))) == 5


@pytest.mark.parametrize("name", [name for name in ALL if name != "game24"])
def test_training_task_with_the_published_question_is_left_out(tmp_path, name):
    row = json.loads((SAMPLE / f"{name}.jsonl").read_text().splitlines()[0])
    question = next(row[column] for column in ("question", "Question", "Problem") if column in row)
    (tmp_path / "mine.jsonl").write_text(json.dumps({"question": question, "answer": "x", "split": "train"}))
    config = config_for(tmp_path, "envs.mix={own_text=1}", f"envs.data_path={tmp_path}/mine.jsonl")
    asked = load_benchmark(name, SAMPLE, whole=False)
    assert evaluation_items(config, request_for(tmp_path, name)) == asked[1:]


def test_held_out_tasks_that_the_adapters_run_trained_on_are_left_out(tmp_path):
    questions = [f"Who is number {number}?" for number in range(3)]

    def recipe(name, trained):
        rows = ({"question": q, "answer": "x", "split": "train" if q in trained else "eval"} for q in questions)
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return config_for(tmp_path, "envs.mix={own_text=1}", f"envs.data_path={tmp_path / name}")

    adapter = trained_run(recipe("theirs.jsonl", questions[:2]))
    mine = recipe("mine.jsonl", questions[:1])
    mine = mine.model_copy(update={"evaluation": mine.evaluation.model_copy(update={"num_tasks": 2})})
    assert {task.question for task in evaluation_items(mine, EvaluationRequest())} == set(questions[1:])
    kept = evaluation_items(mine, EvaluationRequest(adapter=adapter))
    assert [task.question for task in kept] == questions[2:]


def test_adapter_of_another_scale_is_rejected(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(broken))
    adapter = trained_run(config_for(tmp_path, "model.lora_alpha=64"))
    with pytest.raises(UserError, match=r"model\.lora_alpha"):
        run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique", adapter=adapter))
    assert not (tmp_path / "out").exists()


def test_evaluation_of_an_adapter_continues_only_with_its_scale(tmp_path, monkeypatch):
    checkpoint = tmp_path / "v000001"
    checkpoint.mkdir()
    (checkpoint / "adapter.safetensors").write_bytes(b"adapter")
    write_manifest(checkpoint, policy_version=1, step=1)
    request = request_for(tmp_path, "musique", adapter=checkpoint)
    use(monkeypatch, ScriptedSolver(lambda task, seed: "no"))
    run_evaluation(config_for(tmp_path), request)
    run_evaluation(config_for(tmp_path), request)
    with pytest.raises(EvaluationError, match="policy"):
        run_evaluation(config_for(tmp_path, "model.lora_alpha=64"), request)


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
    run_evaluation(config, request_for(tmp_path, "musique", "gaia", "medqa"))
    rows = summary_of(tmp_path)["benchmarks"]
    judged = {"asked": 2, "accepted": 1, "silent": 1, "solve_rate_with_judge": 0.5}
    assert (rows["musique"]["solve_rate"], rows["musique"]["judge"]) == (0.0, judged)
    assert rows["gaia"]["judge"] == {"asked": 1, "accepted": 0, "silent": 0, "solve_rate_with_judge": 0.5}
    # A letter has one right form.
    assert rows["medqa"]["judge"] is None


def test_judge_is_asked_about_custom_questions(tmp_path, monkeypatch):
    rows = [{"question": f"{word} country?", "answer": "Great Britain", "split": "eval"} for word in ("Which", "What")]
    rows.append({"question": "Whose country?", "answer": "France", "split": "train"})
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("ray_jobs.evaluate.AnswerJudge", FakeJudge)
    use(monkeypatch, ScriptedSolver(lambda task, seed: "the U.K." if task.id == "own_text-1" else "France"))
    custom = ("envs.mix={own_text=1}", f"envs.data_path={tmp_path / 'own.jsonl'}", "evaluation.num_tasks=2")
    config = config_for(tmp_path, *custom, "evaluation.judge={model='m'}")
    run_evaluation(config, EvaluationRequest(out=tmp_path / "out"))
    row = summary_of(tmp_path)["benchmarks"]["own_text"]
    assert row["judge"] == {"asked": 2, "accepted": 1, "silent": 0, "solve_rate_with_judge": 0.5}


def test_blank_answer_is_not_judged(tmp_path, monkeypatch):
    class BlankSolver(ScriptedSolver):
        async def attempt(self, task, trajectory_id, **options):
            return replace(await super().attempt(task, trajectory_id, **options), answer="")

    monkeypatch.setattr("ray_jobs.evaluate.AnswerJudge", FakeJudge)
    use(monkeypatch, BlankSolver(lambda task, seed: "x"))
    run_evaluation(config_for(tmp_path, "evaluation.judge={model='m'}"), request_for(tmp_path, "musique"))
    row = summary_of(tmp_path)["benchmarks"]["musique"]
    assert (row["num_scored"], row["no_answer"], row["solve_rate"], row["f1"], row["judge"]) == (2, 2, 0.0, 0.0, None)


def test_judge_without_its_key_is_rejected_before_any_attempt(tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    solver = use(monkeypatch, ScriptedSolver(broken))
    config = config_for(tmp_path, "evaluation.judge={model='m', api_key_env='JUDGE_KEY'}")
    with pytest.raises(ApiKeyError, match="JUDGE_KEY"):
        run_evaluation(config, request_for(tmp_path, "musique"))
    assert solver.asked == []


def test_page_escapes_hostile_text(tmp_path, monkeypatch):
    use(monkeypatch, ScriptedSolver(lambda task, seed: "<script>alert(1)</script>"))
    page = run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique")).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page


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
    run_evaluation(config_for(tmp_path), request_for(tmp_path, "musique"))
    assert summary_of(tmp_path)["benchmarks"]["musique"]["leaks"] == expected
