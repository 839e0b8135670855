import json
import math
import sys
import threading
from pathlib import Path

import pytest

from configs.loading import load_run_config
from ray_jobs.cli import main
from ray_jobs.run import provenance
from ray_jobs.run.folder import RunFolder, RunFolderError
from ray_jobs.run.preflight import check_same_run
from rollout.records import RecordLine, read_records

needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")


def make_folder(tmp_path, *overrides):
    return RunFolder.create(load_run_config(None, [f"output_dir={tmp_path}", "name=r", *overrides]))


def read(path):
    return json.loads(path.read_text())


def test_folder_says_what_the_run_is_before_it_does_anything(tmp_path):
    with make_folder(tmp_path, "seed=7") as folder:
        assert folder.path == tmp_path / "r"
        config, origin = read(folder.path / "config.json"), read(folder.path / "provenance.json")
    assert (config["seed"], origin["seed"]) == (7, 7)
    assert config["learner"]["learning_rate"] > 0
    assert origin["versions"].keys() >= {"ray", "numpy", "pydantic"}
    assert origin["python"].startswith("3.")
    assert origin["cores"] >= 1
    assert origin["memory_gib"] > 0
    assert origin["started"]


@pytest.fixture
def resumed(monkeypatch):
    """What `agentflow resume RUN` would go on with: its configuration, and the folder it works in."""
    seen = []
    monkeypatch.setattr("ray_jobs.run.preflight.check_before_start", lambda config, **_: None)
    monkeypatch.setattr(
        "ray_jobs.train.run_training", lambda config, ready, *, with_prm: seen.append((config, Path.cwd()))
    )

    def resume(path):
        assert main(["resume", str(path)]) == 0
        return seen[-1]

    return resume


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A run that was started in `home`, below its folder `runs`, as by default."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    with RunFolder.create(load_run_config(None, ["name=r"])) as folder:
        assert folder.path == home / "runs" / "r"
    return home / "runs" / "r"


def test_run_is_resumed_from_anywhere_in_the_folder_it_was_started_in(begun, tmp_path, monkeypatch, resumed):
    config, cwd = resumed("runs/r")
    assert (config.output_dir, cwd) == ("runs", begun.parents[1])
    monkeypatch.chdir(tmp_path)
    config, cwd = resumed("home/runs/r")
    assert (config.run_path, cwd) == (begun, begun.parents[1])
    check_same_run(config, begun)


def test_run_that_was_moved_is_resumed_where_it_is_now(begun, tmp_path, monkeypatch, resumed):
    moved = begun.rename(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    config, cwd = resumed("other")
    assert (config.run_path, cwd) == (moved, tmp_path)
    check_same_run(config, moved)


def test_run_whose_whole_home_was_moved_is_resumed_in_the_new_one(begun, tmp_path, monkeypatch, resumed):
    monkeypatch.chdir(tmp_path)
    begun.parents[1].rename(tmp_path / "new home")
    config, cwd = resumed(tmp_path / "new home" / "runs" / "r")
    assert (config.run_path, cwd) == (tmp_path / "new home" / "runs" / "r", tmp_path / "new home")


def test_command_can_be_pasted_into_a_shell(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["agentflow", "train", "envs.mix={lookup = 1.0}"])
    with make_folder(tmp_path) as folder:
        assert read(folder.path / "provenance.json")["command"] == "agentflow train 'envs.mix={lookup = 1.0}'"


def test_without_git_the_commit_is_unknown_and_not_called_clean(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "_git", lambda *arguments: None)
    with make_folder(tmp_path) as folder:
        origin = read(folder.path / "provenance.json")
    assert origin["git_commit"] is None
    assert origin["git_dirty"] is None


def test_metrics_can_be_read_while_the_run_goes_on(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with make_folder(tmp_path) as folder:
        folder.log_metrics(1, {"policy/loss": 0.5})
        folder.log_metrics(2, {"policy/loss": 0.25, "rollout/solve_rate": 0.75})
        rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").open()]
        events = EventAccumulator(str(folder.path / "tb"))
        events.Reload()
        losses = [(event.step, event.value) for event in events.Scalars("policy/loss")]
    assert [(row["step"], row["policy/loss"]) for row in rows] == [(1, 0.5), (2, 0.25)] == losses
    assert 0 <= rows[0]["wall_s"] <= rows[1]["wall_s"]
    assert sorted(events.Tags()["scalars"]) == ["Is it learning?/solved", "policy/loss", "rollout/solve_rate"]


def test_a_loss_that_became_nan_is_kept_as_what_it_is(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.log_metrics(1, {"policy/loss": math.nan})
        assert math.isnan(read(folder.path / "metrics.jsonl")["policy/loss"])


def test_summary_replaces_the_one_before_and_leaves_no_partial_file(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.write_summary({"num_steps": 1})
        folder.write_summary({"num_steps": 2})
        assert read(folder.path / "summary.json") == {"num_steps": 2}
        assert list(folder.path.glob("*.partial")) == []


def test_summary_that_cannot_be_written_leaves_the_old_one(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.write_summary({"num_steps": 1})
        with pytest.raises(TypeError):
            folder.write_summary({"num_steps": object()})
        assert read(folder.path / "summary.json") == {"num_steps": 1}


def test_text_in_any_script_survives(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.log_trajectories([{"question": "Wie viele Äpfel? 苹果 \n2"}])
        (line,) = (folder.path / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["question"] == "Wie viele Äpfel? 苹果 \n2"


def test_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"cannot write '.*file/r': Not a directory; .*output_dir"):
        make_folder(tmp_path / "file")


@needs_full_device
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("metrics.jsonl", lambda folder: folder.log_metrics(1, {"policy/loss": 0.5})),
        ("trajectories.jsonl", lambda folder: folder.log_trajectories([{"id": "one"}])),
        ("summary.partial", lambda folder: folder.write_summary({"num_steps": 1})),
    ],
)
def test_full_disk_is_one_clear_error(tmp_path, name, write):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / name).symlink_to("/dev/full")
    folder = make_folder(tmp_path)
    with pytest.raises(RunFolderError, match="No space left on device; free some space"):
        write(folder)


def train_row(step):
    return RecordLine(head={"id": f"{step}", "phase": "train", "step": step}, turns=b"[]")


def slow_rows(step, gate):
    gate.wait(60)
    yield train_row(step)


def test_trajectories_of_a_step_are_written_while_the_run_goes_on(tmp_path):
    gate = threading.Event()
    with make_folder(tmp_path) as folder:
        folder.log_step(1, slow_rows(1, gate), version_ages={})
        folder.log_metrics(1, {"policy/loss": 0.5})
        assert (folder.path / "trajectories.jsonl").read_text() == ""
        gate.set()
        folder.catch_up()
        assert [row["step"] for row in read_records(folder.path / "trajectories.jsonl")] == [1]


@pytest.mark.parametrize(("step", "left"), [(1, [1]), (2, [1, 2])])
def test_rewinding_waits_for_what_is_being_written(tmp_path, step, left):
    gate = threading.Event()
    with make_folder(tmp_path) as folder:
        folder.log_step(1, [train_row(1)], version_ages={})
        folder.log_step(2, slow_rows(2, gate), version_ages={})
        threading.Timer(0.1, gate.set).start()
        folder.rewind(step)
        assert [row["step"] for row in read_records(folder.path / "trajectories.jsonl")] == left
        folder.log_step(3, [train_row(3)], version_ages={})
    assert [row["step"] for row in read_records(folder.path / "trajectories.jsonl")] == [*left, 3]


@needs_full_device
def test_disk_that_is_full_while_a_step_is_written_is_told_to_the_next(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "trajectories.jsonl").symlink_to("/dev/full")
    folder = make_folder(tmp_path)
    folder.log_step(1, [train_row(1)], version_ages={})
    with pytest.raises(RunFolderError, match="No space left on device; free some space"):
        folder.catch_up()


@needs_full_device
def test_files_behind_a_full_one_are_closed_as_well(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").symlink_to("/dev/full")
    folder = make_folder(tmp_path)
    with pytest.raises(RunFolderError), folder:
        folder.log_metrics(1, {"policy/loss": 0.5})
    with pytest.raises(ValueError, match="closed file"):
        folder.log_trajectories([{"id": "one"}])
