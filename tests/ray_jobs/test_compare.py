import json

import pytest
from evaluating import ScriptedSolver, config_for, evaluate, right_answer, use
from view_world import evaluation_row

from configs.errors import UserError
from ray_jobs.compare import run_compare
from ray_jobs.run.folder import RunFolder

MIX = ("evaluation.mix={lookup=0.5, two_lookup=0.25, chain=0.25}", "evaluation.num_tasks=40")


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """Evaluate a policy that is right where `right(task, seed)` is true, and return the folder."""

    def run(name, right, *overrides, seeds=1):
        use(monkeypatch, ScriptedSolver(lambda task, seed: right_answer(task) if right(task, seed) else "no"))
        evaluate(config_for(tmp_path, *MIX, *overrides), tmp_path / name, seeds=seeds)
        return tmp_path / name

    return run


def none(task, seed):
    return False


def every(task, seed):
    return True


def compared(before, after, **options):
    page = run_compare(before, after, **{"out": None, "anyway": False} | options)
    return json.loads((page.parent / "comparison.json").read_text())


def test_gain_is_paired_by_item_and_benchmark(evaluated):
    result = compared(evaluated("before", none), evaluated("after", lambda task, seed: task.dataset == "lookup"))
    row = result["benchmarks"]["lookup"]
    assert (row["num_tasks"], row["before"], row["after"]) == (20, 0.0, 1.0)
    assert (row["only_before"], row["only_after"], row["p"]) == (0, 20, 2 / 2**20)
    assert result["benchmarks"]["chain"]["p"] == 1.0
    assert result["benchmarks"]["chain"]["items_for_this_gain"] is None
    assert (result["all"]["num_tasks"], result["all"]["gain"]) == (40, 0.5)
    assert result["all"]["ci95"] == pytest.approx([0.32, 0.64], abs=0.02)


def test_different_settings_are_rejected(evaluated):
    before = evaluated("before", none)
    for name, override in {"agent": "agent.max_steps=2", "items": "evaluation.num_tasks=20"}.items():
        with pytest.raises(UserError, match=name):
            compared(before, evaluated(name, every, override))


def test_seeds_are_averaged_by_item(evaluated):
    warm = "evaluation.temperature=0.5"
    before = evaluated("before", none, warm, seeds=4)
    after = evaluated("after", lambda task, seed: task.dataset == "chain" and seed == 0, warm, seeds=4)
    row = compared(before, after)["benchmarks"]["chain"]
    assert (row["num_tasks"], row["after"], row["only_after"]) == (10, 0.25, 10)
    # Ten items of one sign: 2 / 2^10.
    assert (row["test"], row["p"]) == ("exact sign-flip permutation test", 2 / 2**10)
    assert row["discordant"] == pytest.approx(1 / 16)


def test_phases_of_a_training_run_are_compared(tmp_path):
    with RunFolder.open(config_for(tmp_path)) as folder:
        for phase, right in {"eval_before": False, "eval_after": True}.items():
            folder.log_trajectories(evaluation_row(index, phase, right=right) for index in range(8))
    moved = folder.path.rename(tmp_path / "moved")
    result = compared(moved, None)
    assert (result["all"]["only_after"], result["all"]["p"]) == (8, 2 / 2**8)
    assert result["differs_in"] == []
    for folder in (tmp_path / "model", tmp_path):
        with pytest.raises(UserError):
            compared(folder, None)
