import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.loading import load_run_config
from envs.types import Task, ToolCall
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.trackers import HISTOGRAMS, StepDistributions
from rollout.types import Completion, Reward, Trajectory, Turn, packed_floats


def make_turn(*, called=True, policy_version=2, switches=()):
    completion = Completion(
        token_ids=(1, 2, 3, 4),
        logprobs=(-1.0,) * 4,
        text="w",
        finish_reason="stop",
        policy_version=policy_version,
        switches=tuple(map(tuple, switches)),
    )
    known = {"generate_s": 1.5, "tool_s": 0.25, "tool_call": ToolCall(name="search", arguments="w") if called else None}
    learner = packed_floats([-1.0, -1.0, math.nan, -1.0 + math.log(2)])
    return Turn.of(
        role="planner", prompt_token_ids=(), completion=completion, trainable=True, learner_logprobs=learner, **known
    )


def make_record(*turns, outcome=1.0, scored=True):
    for turn in turns:
        turn.advantage, turn.score = 0.5, 0.25 if scored else None
    return Trajectory(
        id="g0/0",
        group_id="g0",
        task=Task(id="t", dataset="d", question="?", answer="42"),
        turns=turns,
        answer="42",
        stop_reason="answered",
        step=1,
        verdict="trained",
        reward=Reward(outcome=outcome, total=outcome),
    )


def make_folder(tmp_path):
    return RunFolder.open(load_run_config(None, [f"output_dir={tmp_path}", "name=r"]))


def open_board(folder, name="tb"):
    events = EventAccumulator(str(folder / name), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0})
    events.Reload()
    return events


AGES = {1: 2, 2: 1, 3: 0}
"""Those of the versions while version 3 is updated."""


def watched(*records):
    looking = StepDistributions(AGES)
    for record in records:
        looking.add(record)
    return looking.histograms()


def test_histograms_count_steps_trajectories_and_tokens():
    values = watched(
        make_record(make_turn(), make_turn(called=False, policy_version=1, switches=[[1, 2]])),
        make_record(make_turn(), outcome=0.0, scored=False),
    )
    assert {name: numbers.size for name, numbers in values.items()} == {
        "steps/advantage": 3,
        "steps/prm_score": 2,
        "steps/tokens": 3,
        "steps/generate_s": 3,
        "steps/tool_s": 2,
        "trajectories/steps": 2,
        "tokens/staleness": 12,
        "tokens/ratio": 9,
    }
    # Eleven tokens of version 2 and one of version 1, before a learner of version 3.
    assert sorted(values["tokens/staleness"]) == [1.0] * 11 + [2.0]
    # A ratio of exp(0) at two tokens of each turn, of exp(log 2) at one.
    assert sorted(values["tokens/ratio"]) == pytest.approx([1.0] * 6 + [2.0] * 3)


def test_scalars_and_histograms_can_be_read_back(tmp_path):
    with make_folder(tmp_path) as folder:
        right, wrong = make_record(make_turn()), make_record(make_turn(), make_turn(), outcome=0.0)
        folder.log_metrics(7, {"rollout/solve_rate": 0.5, "custom/number": 1.0})
        folder.log_step(7, [right, wrong], version_ages=AGES)
        folder.catch_up()
        assert (folder.path / "trajectories.jsonl").read_text().count("\n") == 2
    events = open_board(folder.path)
    assert [(event.step, event.value) for event in events.Scalars("rollout/solve_rate")] == [(7, 0.5)]
    assert [event.value for event in events.Scalars("custom/number")] == [1.0]
    assert set(events.Tags()["histograms"]) == set(HISTOGRAMS)
    (tokens,) = events.Histograms("steps/tokens")
    assert (tokens.step, tokens.histogram_value.num, tokens.histogram_value.sum) == (7, 3.0, 12.0)


def test_rewind_hides_later_steps_and_unfinished_phases(tmp_path):
    with make_folder(tmp_path) as folder:
        for step in range(5):
            folder.log_metrics(step, {"cold_start/loss": 2.0})
        folder.finish_phase("cold_start", 1.0, {})
        folder.log_metrics(0, {"train_prm/loss": 1.0})
        for step in (1, 2, 3):
            folder.log_metrics(step, {"policy/loss": float(step)})
            folder.log_step(step, [make_record(make_turn())], version_ages=AGES)
    with RunFolder.open(
        load_run_config(None, [f"output_dir={tmp_path}", "name=r"]), with_prm=False, tell=str
    ) as folder:
        assert [row["step"] for row in folder.rewind(2)] == [1, 2]
        folder.log_metrics(0, {"train_prm/loss": 3.0})
        folder.log_metrics(3, {"policy/loss": 30.0})
        folder.log_step(3, [make_record(make_turn(), make_turn())], version_ages=AGES)
    events = open_board(folder.path)
    assert [(one.step, one.value) for one in events.Scalars("policy/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    steps = [(one.step, one.histogram_value.sum) for one in events.Histograms("trajectories/steps")]
    assert steps == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert len(open_board(folder.path, "tb/cold_start").Scalars("cold_start/loss")) == 5
    assert [one.value for one in open_board(folder.path, "tb/train_prm").Scalars("train_prm/loss")] == [3.0]
