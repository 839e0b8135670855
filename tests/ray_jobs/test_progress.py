from configs.loading import load_run_config
from ray_jobs.run.metrics import Shares
from ray_jobs.run.progress import VERDICT_WINDOW, Training


def make_row(**shares):
    """A step whose learner waits and whose engine is busy, by default."""
    idle = dict.fromkeys(Shares.__dataclass_fields__, 0.0) | {"kept_share": 1.0}
    told = idle | {"learner_wait": 0.6, "engine_busy": 0.9} | shares
    return {
        "rollout/solve_rate": 0.5,
        "rollout/groups_kept_share": 0.4,
        "policy/staleness_max": 1.0,
        "time/step_s": 12.0,
        **{f"util/{name}": value for name, value in told.items()},
    }


def make_training(*rows, scored=True):
    """As resumed, from the rows of metrics.jsonl."""
    logged = [{"step": step, **row} for step, row in enumerate(rows, 1)]
    return Training.of(load_run_config(None, []), logged, num_steps=len(rows), scored=scored)


def news_of(training, *rows):
    """Return the message after each of these steps."""
    said = []
    for row in rows:
        training.add(row)
        said.append(training.news())
    return said


LEARNER = {"learner_wait": 0.0, "backpressure": 0.5}


def test_verdict_is_reported_once_when_settled_and_again_when_it_changes():
    training = make_training()
    said = news_of(training, *[make_row()] * 6)
    assert said[:VERDICT_WINDOW] == [None] * VERDICT_WINDOW
    assert "engine" in said[VERDICT_WINDOW]
    assert said[VERDICT_WINDOW + 1 :] == [None, None]
    later = [one for one in news_of(training, *[make_row(**LEARNER)] * 6) if one]
    assert len(later) == 1
    assert "learner limits" in later[0]


def test_alarms_require_step_scores():
    """Regression: a run with credit by outcome alone reported alarms about a PRM that it did not have."""
    rows = [make_row() | {"rollout/solve_rate": rate} for rate in [0.9] * 6 + [0.3] * 4]
    watched, unwatched = make_training(*rows), make_training(*rows, scored=False)
    assert [one.name for one in watched.monitor.alarms] == ["solve rate"]
    assert unwatched.monitor.alarms == []
