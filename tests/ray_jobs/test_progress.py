from configs.loading import load_run_config
from ray_jobs.run.progress import Training


def make_training(*rates, scored=True):
    """As resumed, from the rows of metrics.jsonl."""
    shares = {"util/kept_share": 1.0, "util/learner_wait": 0.6, "util/engine_busy": 0.9, "time/step_s": 12.0}
    rows = [{"step": step, "rollout/solve_rate": rate, **shares} for step, rate in enumerate(rates, 1)]
    return Training.of(load_run_config(None, []), rows, num_steps=len(rows), scored=scored)


def test_alarms_require_step_scores():
    """Regression: a run with credit by outcome alone reported alarms about a PRM that it did not have."""
    rates = [0.9] * 6 + [0.3] * 4
    assert [one.name for one in make_training(*rates).monitor.alarms] == ["solve rate"]
    assert make_training(*rates, scored=False).monitor.alarms == []
