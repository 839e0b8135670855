import json
import sys

import pytest

from configs.loading import load_run_config
from ray_jobs.run import trackers
from ray_jobs.run.folder import RunFolder

KEY = "0123456789abcdef0123456789abcdef01234567"


class Recorder:
    """A tracker that keeps its rows."""

    def __init__(self):
        self.rows, self.names, self.error = [], [], None

    def open(self, folder, name, known):
        self.names.append((name, known))
        return f"id-{len(self.names)}" if known is None else known, self.add, lambda: self.rows.append("closed")

    def add(self, step, metrics):
        if self.error:
            raise self.error
        self.rows.append((step, metrics["policy/loss"]))


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(trackers.OPENERS, "wandb", recorder.open)
    return recorder


def opened(tmp_path, name="wandb", notes=None):
    config = load_run_config(None, [f"output_dir={tmp_path}", "name=r", f'trackers=["{name}"]'])
    return RunFolder.open(config, with_prm=False, tell=(notes if notes is not None else []).append)


def train(folder, *steps, settle=True):
    for step in steps:
        folder.log_metrics(step, {"policy/loss": 0.5 * step, "rollout/solve_rate": 0.25})
    if settle:
        folder.settle()


def two_sessions(tmp_path, name):
    """A run of two steps, killed after a third, and resumed; returns the loss of each step in metrics.jsonl."""
    notes = []
    with opened(tmp_path, name, notes) as folder:
        train(folder, 1, 2)
        train(folder, 3, settle=False)
    with opened(tmp_path, name, notes) as folder:
        folder.rewind(2)
        train(folder, 3, 4)
    assert [note for note in notes if "tracker '" in note] == []
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").open()]
    return [(row["step"], row["policy/loss"]) for row in rows]


def test_tracker_gets_each_row_once_although_the_run_is_resumed(tmp_path, recorder):
    expected = two_sessions(tmp_path, "wandb")
    assert [row for row in recorder.rows if row != "closed"] == expected == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]
    assert recorder.rows.count("closed") == 2
    assert recorder.names == [("r", None), ("r", "id-1")]


@pytest.mark.parametrize("error", [RuntimeError("no\nroute"), SystemExit("no route")])
def test_failed_tracker_is_reported_once_and_the_run_continues(tmp_path, recorder, error):
    recorder.error, notes = error, []
    with opened(tmp_path, notes=notes) as folder:
        train(folder, 1)
        train(folder, 2)
    [note] = [note for note in notes if "tracker '" in note]
    assert type(error).__name__ in note
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 2


def test_report_of_a_failure_quotes_no_key(tmp_path, recorder, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    recorder.error, notes = RuntimeError(f"401 for {KEY}"), []
    with opened(tmp_path, notes=notes) as folder:
        train(folder, 1)
    assert len(notes) == 1
    assert KEY not in notes[0]


def test_wandb_gets_the_scalars_and_no_secret(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(sys, "argv", ["agentflow", "train", "password=open-sesame-1"])
    two_sessions(tmp_path, "wandb")
    files = [path for path in (tmp_path / "r" / "trackers").rglob("*") if path.is_file()]
    assert [path for path in files if path.suffix == ".wandb"]
    everything = b"".join(path.read_bytes() for path in files)
    assert b"policy/loss" in everything
    assert KEY.encode() not in everything
    assert b"open-sesame-1" not in everything
