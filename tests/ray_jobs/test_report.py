import json
import re

import pytest

from configs.loading import load_run_config
from envs.types import Task, ToolResult
from ray_jobs.run.folder import RunFolder
from ray_jobs.viewer.pages import TEMPLATES
from ray_jobs.viewer.report import write_report
from rollout.types import Reward, Trajectory, Turn

EVIL = """'"><script>alert(1)</script><b onclick=x>{{ 7 * 7 }}"""
METRICS = {"policy/loss": 0.02, "rollout/solve_rate": 0.107}


def make_turn(error=None):
    result = ToolResult(text="37 kg", error=error)
    return Turn(role="planner", text="", finish_reason="stop", policy_version=0, trainable=True, tool_result=result)


def make_attempt(phase, reward, *, task="t1", **changes):
    attempt = {"answer": "41", "stop_reason": "answered", "turns": (make_turn(),)} | changes
    asked = Task(id=task, dataset="lookup", question="?", answer="42")
    return Trajectory(
        id="t", group_id="g", task=asked, phase=phase, reward=Reward(outcome=reward, total=reward), **attempt
    )


def make_summary(**changes):
    summary = {
        **{"verdict": "+70.0 points, significant", "mcnemar_p": 1e-9, "seed": 5, "num_eval_tasks": 100},
        **{"solve_rate_untouched": 0.0, "num_untouched_tasks": 10, "solve_rate_before": 0.1, "solve_rate_after": 0.8},
        "by_dataset": {"lookup": {"num": 100, "before": 0.1, "after": 0.8}},
        "cold_start": {"num_demonstrations": 104, "num_right": 31},
    }
    return summary | changes


@pytest.fixture
def folder(tmp_path):
    with RunFolder.open(load_run_config(None, [f"output_dir={tmp_path}", "name=r"])) as folder:
        yield folder


def render(folder):
    return write_report(folder.path).read_text(encoding="utf-8")


def figures(page):
    return re.findall(r"<figure>.*?</figure>", page, flags=re.DOTALL)


def test_report_shows_the_gain_the_learning_curve_and_the_links(folder):
    for step in (1, 2):
        folder.log_metrics(step, METRICS)
    folder.log_trajectories([make_attempt("eval_before", 0.0), make_attempt("eval_after", 1.0, answer="42")])
    folder.write_summary(make_summary(num_steps=2))
    page = render(folder)
    assert re.findall(r'class="hero">([^<]*)<', page) == ["+70.0 points"]
    (curve,) = figures(page)
    assert re.findall(r'class="mark (\w+)"', curve) == ["before", "after"]
    order = [page.index(part) for part in ('class="hero"', 'class="card caveats"', "<figure>", "<section")]
    assert order == sorted(order)
    links = re.findall(r'href="([^"]*)"', page)
    assert links == ["summary.json", "config.json", "metrics.jsonl", "trajectories.jsonl"]
    assert all((folder.path / link).exists() for link in links)


def test_caveats_name_the_reason_for_missing_train_steps(folder):
    folder.write_summary(make_summary(num_steps=2))
    assert "Training ended" not in render(folder)
    folder.write_summary(make_summary(num_steps=2, ended_early=f"all right {EVIL}"))
    (caveats,) = re.findall(r'<div class="card caveats">.*?</div>', render(folder), flags=re.DOTALL)
    assert [part in caveats for part in ("after 2 of", "all right", EVIL)] == [True, True, False]


def test_outcomes_separate_wrong_missing_and_unscored_answers(folder):
    outcomes = [
        (1.0, {}),
        (0.0, {}),
        (0.0, {"answer": None, "stop_reason": "format"}),
        (None, {"stop_reason": "infrastructure"}),
        (0.0, {"turns": (make_turn("timeout"),) * 2}),
    ]
    folder.log_trajectories(
        make_attempt("eval_before", one, task=str(at), **how) for at, (one, how) in enumerate(outcomes)
    )
    folder.write_summary(make_summary(by_dataset={}))
    cells = re.findall(r'<td class="num">([^<]*)</td>', render(folder))
    # Tasks, right, wrong, none, unscored, failed calls, turns per task.
    assert cells == ["5", "1", "2", "1", "1", "2", "1.2"]


def test_untrusted_text_is_escaped_and_nothing_is_loaded(folder):
    folder.log_metrics(
        1, METRICS | {f"solved/{EVIL}": 1.0, f"held_out/solve_rate/{EVIL}": 1.0, "held_out/solve_rate": 1}
    )
    rates = {EVIL: {"num": 4, "before": 0.5, "after": 0.0, "trained": False}}
    folder.write_summary(make_summary(by_dataset=rates, verdict=EVIL, bottleneck=EVIL, seed=EVIL))
    provenance = json.loads((folder.path / "provenance.json").read_text()) | {"command": EVIL, "versions": {EVIL: EVIL}}
    (folder.path / "provenance.json").write_text(json.dumps(provenance))
    page = render(folder)
    assert "<script" not in page
    assert "<b onclick" not in page
    assert "49" not in re.findall(r"\{\{.*?\}\}", page)
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(""", page)


def test_templates_mark_only_drawings_and_styles_as_safe():
    assert sum(path.read_text().count("|safe") for path in TEMPLATES.glob("*.j2")) == 2
