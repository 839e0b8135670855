import numpy as np
import pytest

from reward.prm.evidence import step_weights


def row(share, num, family="lookup"):
    return {f"prm/order/{family}": share, f"prm/order_groups/{family}": float(num)}


def test_without_evidence_there_is_no_weight():
    assert step_weights([], 0.5) == {}
    assert step_weights([{"rollout/solve_rate": 0.5}], 0.5) == {}
    assert step_weights([row(1.0, 3)], 0.5) == {"lookup": 0.0}


def test_weight_grows_with_the_lower_end_of_the_share_as_computed_by_hand():
    # 16 groups at 0.8: with three at the mean, 0.8, m = 0.8; se = sqrt(0.16 / 16) = 0.1; (0.7 - 0.5) / 0.2 = 1.
    assert step_weights([row(0.8, 16)], 0.5) == {"lookup": pytest.approx(0.5)}
    # se = sqrt(0.21 / 21) = 0.1; (0.7 - 0.1 - 0.5) / 0.2 = 0.5.
    assert step_weights([row(0.7, 11), row(0.7, 10)], 0.5) == {"lookup": pytest.approx(0.25)}
    assert step_weights([row(0.5, 40)], 0.5) == {"lookup": 0.0}


def test_a_family_without_much_evidence_leans_on_the_others():
    weights = step_weights([row(0.9, 30) | row(0.7, 4, "chain")], 1.0)
    assert weights["chain"] > step_weights([row(0.7, 4, "chain")], 1.0)["chain"]
    weights = step_weights([row(0.9, 30) | row(0.2, 20, "difference")], 1.0)
    assert (weights["lookup"], weights["difference"]) == (1.0, 0.0)


def test_only_the_newest_groups_count():
    assert step_weights([row(0.0, 400), row(0.95, 20), row(0.95, 20)], 0.5) == {"lookup": 0.5}
    assert step_weights([row(0.95, 400), row(0.3, 40)], 0.5) == {"lookup": 0.0}


def test_a_scorer_that_knows_nothing_rarely_has_weight():
    rng = np.random.default_rng(0)
    found = [step_weights([row(share, 20) for share in rng.uniform(size=(2, 20)).mean(1)], 0.5) for _ in range(200)]
    assert np.mean([weights["lookup"] for weights in found]) < 0.01
