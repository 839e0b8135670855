import json

import pytest

from configs.loading import load_run_config
from ray_jobs.report import write_report
from ray_jobs.run_folder import RunFolder

EVIL = "<script>alert(1)</script>"


def make_record(phase, reward, **changes):
    turn = {
        "role": "planner",
        "thought": EVIL,
        "action": "code",
        "action_input": EVIL,
        "result": EVIL,
        "tool_error": None,
        "format_error": None,
        "text": EVIL,
    }
    record = {
        "phase": phase,
        "task_id": "t1",
        "question": EVIL,
        "gold": "42",
        "answer": EVIL,
        "stop_reason": "answered",
        "reward": reward,
        "turns": [turn, turn | {"format_error": EVIL}],
    }
    return record | changes


def make_summary():
    return {
        "verdict": "+70.0 points, significant",
        "solve_rate_untouched": 0.0,
        "num_untouched_tasks": 10,
        "solve_rate_before": 0.1,
        "solve_rate_after": 0.8,
        "num_eval_tasks": 100,
        "by_dataset": {"lookup": {"num": 100, "before": 0.1, "after": 0.8}},
        "cold_start": {"num_demonstrations": 104, "num_right": 31},
        "phases": {"reinforce": 12.5},
    }


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(load_run_config(None, [f"output_dir={tmp_path}", "name=r"])) as folder:
        yield folder


def test_report_states_the_verdict_and_shows_a_task_before_and_after(folder):
    metrics = {"rollout/solve_rate": 0.5, "rollout/groups_kept_share": 0.5, "learner/step_s": 1, "learner/wait_s": 2}
    folder.log_metrics(1, metrics)
    folder.log_metrics(2, metrics)
    folder.log_trajectories([make_record("eval_before", 0.0), make_record("eval_after", 1.0)])
    folder.write_summary(make_summary())
    page = write_report(folder.path).read_text()
    for words in ("10.0%", "80.0%", "104 scripted demonstrations", "The same task after RL", "+70.0 points"):
        assert words in page


def test_text_of_models_and_tools_is_escaped_and_nothing_comes_from_outside(folder):
    folder.log_trajectories([make_record("eval_before", 0.0), make_record("eval_after", 1.0)])
    folder.write_summary(make_summary())
    page = write_report(folder.path).read_text()
    assert EVIL not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page


def test_report_of_a_run_that_did_not_finish_says_so(folder):
    assert "did not finish" in write_report(folder.path).read_text()


def test_record_that_a_crash_cut_off_is_left_out(folder):
    folder.log_trajectories([make_record("eval_after", 0.0)])
    with (folder.path / "trajectories.jsonl").open("a") as stream:
        stream.write('{"phase": "eval_')
    assert "still fails" in write_report(folder.path).read_text()


def test_metrics_have_the_same_names_in_the_file_and_in_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder.log_metrics(3, {"policy/loss": 0.25})
    folder.close()
    row = json.loads((folder.path / "metrics.jsonl").read_text())
    assert (row["step"], row["policy/loss"]) == (3, 0.25)
    events = EventAccumulator(str(folder.path / "tb"))
    events.Reload()
    (event,) = events.Scalars("policy/loss")
    assert (event.step, event.value) == (3, 0.25)


def test_run_folder_names_configuration_versions_and_machine(folder):
    config = json.loads((folder.path / "config.json").read_text())
    origin = json.loads((folder.path / "provenance.json").read_text())
    assert config["name"] == "r"
    assert origin["versions"]["ray"]
    assert origin["cores"] >= 1
