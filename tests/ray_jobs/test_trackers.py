"""Every tracker is told what metrics.jsonl holds, once, and no run is harmed by one."""

import json
import sqlite3
import sys
import threading
from pathlib import Path

import pytest

from configs.loading import load_run_config
from ray_jobs.run import trackers
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.trackers import TrackerError, check_trackers


class Recorder:
    """A tracker that keeps what it is told in `TOLD`."""

    TOLD: list = []
    names: list = []

    def __init__(self, folder, name, run_id):
        self.names.append((name, run_id))

    def add(self, index, step, metrics):
        self.TOLD.append((index, step, dict(metrics)))

    def close(self):
        self.TOLD.append("closed")


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(Recorder, "TOLD", [])
    monkeypatch.setattr(Recorder, "names", [])
    monkeypatch.setitem(trackers.OPENERS, "wandb", Recorder)
    return Recorder.TOLD


def opened(tmp_path, name="wandb", notes=None):
    config = load_run_config(None, [f"output_dir={tmp_path}", "name=r", f'trackers=["{name}"]'])
    return RunFolder.open(config, with_prm=False, tell=(notes if notes is not None else []).append)


def train(folder, *steps, settle=True):
    for step in steps:
        folder.log_metrics(step, {"policy/loss": 0.5 * step, "rollout/solve_rate": 0.25})
    if settle:
        folder.settle()


def test_a_tracker_is_told_the_rows_of_the_metrics_with_their_names_and_values(tmp_path, told):
    with opened(tmp_path) as folder:
        train(folder, 1, 2)
    assert told == [
        (0, 1, {"policy/loss": 0.5, "rollout/solve_rate": 0.25}),
        (1, 2, {"policy/loss": 1.0, "rollout/solve_rate": 0.25}),
        "closed",
    ]


def test_rows_that_a_resumption_takes_back_are_told_once_and_with_the_values_that_stay(tmp_path, told):
    with opened(tmp_path) as folder:
        train(folder, 1, 2)
        train(folder, 3, settle=False)
    with opened(tmp_path) as folder:
        folder.rewind(2)
        folder.log_metrics(3, {"policy/loss": 9.0})
        folder.settle()
    assert [(row[1], row[2]["policy/loss"]) for row in told if row != "closed"] == [(1, 0.5), (2, 1.0), (3, 9.0)]


def test_rows_that_were_told_already_are_not_told_again_where_an_older_checkpoint_is_taken(tmp_path, told):
    with opened(tmp_path) as folder:
        train(folder, 1, 2)
    with opened(tmp_path) as folder:
        folder.rewind(1)
        train(folder, 2, 3)
    assert [row[1] for row in told if row != "closed"] == [1, 2, 3]


def test_a_kill_while_a_row_is_marked_leaves_the_mark_of_the_row_before(tmp_path, told, monkeypatch):
    with opened(tmp_path) as folder:
        train(folder, 1, 2)
    with monkeypatch.context() as killed, opened(tmp_path) as folder:
        killed.setattr(Path, "write_text", lambda path, *_, **__: path.open("w").close() or sys.exit("killed"))
        train(folder, 3)
    with opened(tmp_path) as folder:
        train(folder, 4)
    assert [row[1] for row in told if row != "closed"] == [1, 2, 3, 4]


@pytest.mark.parametrize("error", [RuntimeError("no\nroute"), SystemExit("no route")])
def test_a_tracker_that_fails_costs_the_run_one_line(tmp_path, told, monkeypatch, error):
    def fails(self, index, step, metrics):
        raise error

    monkeypatch.setattr(Recorder, "add", fails)
    notes = []
    with opened(tmp_path, notes=notes) as folder:
        train(folder, 1)
        train(folder, 2)
    [note] = [note for note in notes if "tracker" in note]
    assert note == f"tracker 'wandb' stopped, the run goes on without it: {type(error).__name__}: no route"
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_failure_that_quotes_a_key_is_told_without_it(tmp_path, told, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")

    def fails(self, index, step, metrics):
        raise RuntimeError("401 for 0123456789abcdef0123456789abcdef01234567")

    monkeypatch.setattr(Recorder, "add", fails)
    notes = []
    with opened(tmp_path, notes=notes) as folder:
        train(folder, 1)
    assert notes == ["tracker 'wandb' stopped, the run goes on without it: RuntimeError"]


def test_a_tracker_that_hangs_does_not_hold_the_end_of_a_run(tmp_path, told, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(trackers, "PATIENCE_S", 0.05)
    monkeypatch.setattr(Recorder, "add", lambda *_: released.wait())
    notes = []
    with opened(tmp_path, notes=notes) as folder:
        train(folder, 1)
    released.set()
    assert notes == ["tracker 'wandb' stopped, the run goes on without it: it did not end within 0 s"]


def test_a_file_that_a_tracker_takes_away_again_does_not_end_a_phase_badly(tmp_path, told, monkeypatch):
    synced = []
    monkeypatch.setattr("rollout.store.disk.sync", synced.append)
    with opened(tmp_path) as folder:
        train(folder, 1)
        folder.finish_phase("rl", 1.0, {})
    assert folder.path / "metrics.jsonl" in synced
    assert [path for path in synced if "trackers" in path.parts] == []


def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(TrackerError) as caught:
        check_trackers(["trackio"])
    assert str(caught.value) == (
        "trackers: 'trackio' is not installed; pip install 'agentflow-ray[trackio]', or take it out of trackers"
    )


def test_a_run_whose_folder_gets_another_name_goes_on_in_the_same_run_of_a_tracker(tmp_path, told):
    """Regression: Trackio, which knows runs by their names, had its curves cut in two."""
    with opened(tmp_path) as folder:
        train(folder, 1)
    folder.path.rename(tmp_path / "renamed")
    config = load_run_config(None, [f"output_dir={tmp_path}", "name=renamed", 'trackers=["wandb"]'])
    with RunFolder.open(config, with_prm=False, tell=str) as folder:
        train(folder, 2)
    assert Recorder.names == [("r", folder.fingerprint)] * 2


def two_sessions(tmp_path, name):
    """A run of two steps, killed after a third, and gone on with; the loss by step in the run's own metrics."""
    notes = []
    with opened(tmp_path, name, notes) as folder:
        train(folder, 1, 2)
        train(folder, 3, settle=False)
    with opened(tmp_path, name, notes) as folder:
        folder.rewind(2)
        train(folder, 3, 4)
    assert [note for note in notes if "tracker" in note] == []
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").open()]
    return [(row["step"], row["policy/loss"]) for row in rows]


def test_mlflows_file_store_holds_the_same_steps_and_values_once(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    expected = two_sessions(tmp_path, "mlflow")
    [history] = (tmp_path / "r" / "trackers").rglob("metrics/policy/loss")
    lines = [line.split() for line in history.read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in (line[:3] for line in lines)] == expected


def test_trackios_database_holds_the_same_steps_and_values_once(tmp_path, monkeypatch):
    # It reads the variable when it is imported.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    expected = two_sessions(tmp_path, "trackio")
    [database] = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as rows:
        found = rows.execute("select step, metrics from metrics order by step").fetchall()
    assert [(step, json.loads(metrics)["policy/loss"]) for step, metrics in found] == expected


def test_wandb_offline_holds_the_same_steps_and_values_once(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setattr(sys, "argv", ["agentflow", "train", "password=open-sesame-1"])
    expected = two_sessions(tmp_path, "wandb")
    files = [path for path in (tmp_path / "r" / "trackers").rglob("*") if path.is_file()]
    logs = sorted(path for path in files if path.suffix == ".wandb")
    assert len(logs) == 2
    found = [row for path in logs for row in wandb_rows(path.read_bytes())]
    assert [(row["step"], row["policy/loss"]) for row in found] == expected
    assert [row["_step"] for row in found] == [0, 1, 2, 3]
    everything = b"".join(path.read_bytes() for path in files)
    assert b"0123456789abcdef" not in everything
    assert b"open-sesame-1" not in everything


def wandb_rows(data):
    """The rows of an offline run of less than 32 KiB: a header, then records, each behind a checksum of four bytes, its
    length in two, and its kind in one."""
    from wandb.proto.wandb_internal_pb2 import Record

    place = 7
    while place < len(data):
        size = int.from_bytes(data[place + 4 : place + 6], "little")
        record = Record.FromString(data[place + 7 : place + 7 + size])
        place += 7 + size
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
