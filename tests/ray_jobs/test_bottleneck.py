import pytest

from ray_jobs.run.metrics import average_shares, limit_of, shares_of_step, verdict
from rollout.concurrency import WorkerReading


def make_shares(**changes):
    """A balanced run: the learner computes and waits little, and workers are not held back."""
    loop = {"learner_busy": 0.85, "learner_wait": 0.1, "publish": 0.02}
    workers = {"backpressure": 0.05, "engine_busy": 0.6, "places_used": 0.8}
    return loop | workers | {"tool_wait": 0.1, "prm_wait": 0.05, "kept_share": 0.6} | changes


def make_reading(**changes):
    reading = {"elapsed_s": 10.0, "admission_wait_s": 0.0, "engine_busy_s": 0.0, "places": 8, "running": 0}
    return WorkerReading(**(reading | changes))


WAITING = {"learner_wait": 0.5, "learner_busy": 0.4}


@pytest.mark.parametrize(
    ("worse", "first"),
    [
        ({"publish": 0.6, "learner_wait": 0.1, "backpressure": 0.9}, "weight_sync"),
        ({"learner_wait": 0.19, "backpressure": 0.9, "kept_share": 0.0, "prm_wait": 1.0}, "learner"),
        ({**WAITING, "kept_share": 0.1, "prm_wait": 0.9, "tool_wait": 0.9, "engine_busy": 0.1}, "signal"),
        ({**WAITING, "prm_wait": 0.9, "tool_wait": 0.9, "engine_busy": 0.1, "backpressure": 0.9}, "prm"),
        ({**WAITING, "tool_wait": 0.9, "engine_busy": 0.1, "backpressure": 0.9}, "tools"),
        ({**WAITING, "engine_busy": 0.9, "backpressure": 0.9}, "engine"),
        ({**WAITING, "backpressure": 0.3}, "admission"),
        ({}, "balanced"),
    ],
)
def test_first_matching_rule_decides(worse, first):
    shares = make_shares(**worse)
    assert limit_of(shares) == first
    assert verdict(shares)


def test_shares_of_a_step():
    facts = {"generate_s": 60.0, "tool_s": 20.0, "duration_s": 50.0, "prm_s": 5.0, "groups": 8.0, "kept": 6.0}
    readings = [
        make_reading(admission_wait_s=1.0, engine_busy_s=8.0, running=6),
        make_reading(elapsed_s=30.0, admission_wait_s=3.0, engine_busy_s=28.0, places=4, running=3),
    ]
    loop = {"learner_busy": 0.7, "learner_wait": 0.2, "publish": 0.1}
    workers = {"backpressure": 0.1, "engine_busy": 0.9, "places_used": 0.75}
    expected = loop | workers | {"tool_wait": 0.25, "prm_wait": 0.1, "kept_share": 0.75}
    assert shares_of_step(facts, readings, wait_s=2.0, train_s=7.0, publish_s=1.0) == expected


def row_of(shares, step_s=10.0, num_trajectories=8):
    row = {f"util/{name}": share for name, share in shares.items()}
    return row | {"time/step_s": step_s, "rollout/trajectories": num_trajectories}


def test_average_weighs_steps_by_seconds_and_groups_by_number():
    quick = make_shares(learner_wait=0.0, engine_busy=0.5, kept_share=0.2)
    slow = make_shares(learner_wait=1.0, engine_busy=0.9, kept_share=0.5)
    average = average_shares([*[row_of(quick, 20 / 3, 16)] * 3, row_of(slow, 60.0, 96)])
    assert average == pytest.approx(make_shares(learner_wait=0.75, engine_busy=0.8, kept_share=0.4))
