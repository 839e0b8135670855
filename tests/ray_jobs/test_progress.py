import pytest

from configs.loading import load_run_config
from ray_jobs.run.progress import Training


def test_step_scores_earn_their_weight_and_lose_it_and_say_so():
    good = {"prm/order/lookup": 0.95, "prm/order_groups/lookup": 5.0}
    bad = {"prm/order/lookup": 0.4, "prm/order_groups/lookup": 30.0}
    config = load_run_config(None, ["reward.credit=outcome_gated"])
    training = Training(config, [{"step": 1} | good], num_steps=1, scored=True)
    assert 0 < training.weights["lookup"] < 0.5
    assert training.add(2, good | {"prm/order_groups/lookup": 40.0}) == []
    assert training.weights == {"lookup": 0.5}
    assert training.add(3, bad) == []
    (message,) = training.add(4, bad)
    assert "lookup" in message
    assert training.weights == {"lookup": 0.0}


def test_outcome_credit_has_no_step_weights():
    rows = [{"step": 1, "prm/order/lookup": 0.9, "prm/order_groups/lookup": 40.0}]
    assert Training(load_run_config(None), rows, num_steps=1, scored=False).weights == {}


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ([0.3] * 4, True),
        ([0.3] * 8, False),
        ([0.05] * 4, False),
        ([0.05] * 4 + [0.1] * 4 + [0.2] * 4, True),
        ([0.05] * 4 + [0.5] * 3, False),
        ([], False),
    ],
)
@pytest.mark.parametrize("name", ["rollout/failed_share", "rollout/unscored_share"])
def test_a_share_of_attempts_without_an_answer_that_rises_is_told(name, shares, told):
    rows = [{"step": step, name: share} for step, share in enumerate(shares, 1)]
    warnings = Training(load_run_config(None), rows, num_steps=len(rows), scored=False).rises()
    assert [name in one for one in warnings] == [True] * told
