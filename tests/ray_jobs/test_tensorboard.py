from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from configs.loading import load_run_config
from ray_jobs.run.folder import RunFolder


def make_folder(tmp_path):
    return RunFolder.open(load_run_config(None, [f"output_dir={tmp_path}", "name=r"]))


def open_board(folder, name="tb"):
    events = EventAccumulator(str(folder / name), size_guidance={"scalars": 0})
    events.Reload()
    return events


def test_rewind_hides_later_steps_and_unfinished_phases(tmp_path, monkeypatch):
    # TensorBoard reads files of one second in the order of their numbers as texts.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))
    with make_folder(tmp_path) as folder:
        for step in range(5):
            folder.log_metrics(step, {"cold_start/loss": 2.0})
        folder.finish_phase("cold_start", 1.0, {})
        folder.log_metrics(0, {"train_prm/loss": 1.0})
        for step in (1, 2, 3):
            folder.log_metrics(step, {"policy/loss": float(step)})
    with make_folder(tmp_path) as folder:
        assert [row["step"] for row in folder.rewind(2)] == [1, 2]
        folder.log_metrics(0, {"train_prm/loss": 3.0})
        folder.log_metrics(3, {"policy/loss": 30.0})
    events = open_board(folder.path)
    assert [(one.step, one.value) for one in events.Scalars("policy/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert len(open_board(folder.path, "tb/cold_start").Scalars("cold_start/loss")) == 5
    assert [one.value for one in open_board(folder.path, "tb/train_prm").Scalars("train_prm/loss")] == [3.0]
