from configs.loading import load_run_config
from ray_jobs.run.progress import Training


def test_alarms_require_step_scores():
    """Regression: a run with credit by outcome alone reported alarms about a PRM that it did not have."""
    rows = [{"step": step, "rollout/solve_rate": rate} for step, rate in enumerate([0.9] * 6 + [0.3] * 4, 1)]
    for scored, alarms in ((True, ["solve rate"]), (False, [])):
        training = Training.of(load_run_config(None), rows, num_steps=len(rows), scored=scored)
        assert [one.name for one in training.monitor.alarms] == alarms
