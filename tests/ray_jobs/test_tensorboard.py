import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from view_world import make_group, trained

from configs.loading import load_run_config
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.trackers import HISTOGRAMS, StepDistributions


def rows_of(step, *outcomes):
    """The trained attempts of a group: a right one has two steps, a wrong one has one."""
    return list(trained(make_group(0, outcomes=outcomes), step))


def make_folder(tmp_path):
    return RunFolder.open(load_run_config(None, [f"output_dir={tmp_path}", "name=r"]))


def open_board(folder, name="tb"):
    events = EventAccumulator(str(folder / name), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0})
    events.Reload()
    return events


AGES = {1: 2, 2: 1, 3: 0}
"""Those of the versions while version 3 is updated."""


def test_histograms_count_steps_trajectories_and_tokens():
    looking = StepDistributions(AGES)
    for row in rows_of(3, 1.0, 0.0):
        looking.add(row)
    values = looking.histograms()
    assert {name: numbers.size for name, numbers in values.items()} == {
        **dict.fromkeys([name for name in HISTOGRAMS if name.startswith("steps/")], 3),
        "trajectories/steps": 2,
        "tokens/staleness": 8,
        "tokens/ratio": 8,
    }
    # Two tokens of version 2 and six of version 1, before a learner of version 3.
    assert sorted(values["tokens/staleness"]) == [1.0] * 2 + [2.0] * 6
    # The learner finds the tokens of an attempt 0, 0.3 and 0.6 nats less likely, in turn: six and two of them.
    ratios = [math.exp(-0.6)] * 2 + [math.exp(-0.3)] * 3 + [1.0] * 3
    assert sorted(values["tokens/ratio"]) == pytest.approx(ratios)


def test_scalars_and_histograms_can_be_read_back(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.log_metrics(7, {"rollout/solve_rate": 0.5, "custom/number": 1.0})
        folder.log_step(7, rows_of(7, 1.0, 0.0), version_ages=AGES)
        folder.catch_up()
        assert (folder.path / "trajectories.jsonl").read_text().count("\n") == 2
    events = open_board(folder.path)
    assert [(event.step, event.value) for event in events.Scalars("rollout/solve_rate")] == [(7, 0.5)]
    assert [event.value for event in events.Scalars("custom/number")] == [1.0]
    assert set(events.Tags()["histograms"]) == set(HISTOGRAMS)
    (tokens,) = events.Histograms("steps/tokens")
    assert (tokens.step, tokens.histogram_value.num, tokens.histogram_value.sum) == (7, 3.0, 8.0)


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
            folder.log_step(step, rows_of(step, 0.0), version_ages=AGES)
    with make_folder(tmp_path) as folder:
        assert [row["step"] for row in folder.rewind(2)] == [1, 2]
        folder.log_metrics(0, {"train_prm/loss": 3.0})
        folder.log_metrics(3, {"policy/loss": 30.0})
        folder.log_step(3, rows_of(3, 1.0), version_ages=AGES)
    events = open_board(folder.path)
    assert [(one.step, one.value) for one in events.Scalars("policy/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    steps = [(one.step, one.histogram_value.sum) for one in events.Histograms("trajectories/steps")]
    assert steps == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert len(open_board(folder.path, "tb/cold_start").Scalars("cold_start/loss")) == 5
    assert [one.value for one in open_board(folder.path, "tb/train_prm").Scalars("train_prm/loss")] == [3.0]
