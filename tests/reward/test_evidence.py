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
    # 17 groups at 0.75, three at 0.5: m = 14.25 / 20 = 0.7125; se = sqrt(0.2048 / 17) = 0.1098.
    assert step_weights([row(0.75, 10), row(0.75, 7)], 0.5) == {"lookup": pytest.approx(0.5 * 0.1027 / 0.2, abs=1e-3)}
    assert step_weights([row(1.0, 40)], 0.5) == {"lookup": 0.5}
    assert step_weights([row(0.5, 40)], 0.5) == {"lookup": 0.0}


def test_families_are_judged_by_their_own_groups():
    weights = step_weights([row(0.95, 40) | row(0.2, 20, "difference") | row(1.0, 4, "chain")], 1.0)
    assert (weights["lookup"], weights["difference"]) == (1.0, 0.0)
    assert 0 < weights["chain"] < 1


def test_only_the_newest_groups_count():
    assert step_weights([row(0.0, 400), row(0.95, 20), row(0.95, 20)], 0.5) == {"lookup": 0.5}
    assert step_weights([row(0.95, 400), row(0.3, 40)], 0.5) == {"lookup": 0.0}


def test_a_scorer_that_knows_nothing_rarely_has_weight():
    rng = np.random.default_rng(0)
    found = [step_weights([row(rng.integers(0, 2, 8).mean(), 8)], 1.0)["lookup"] for _ in range(500)]
    assert np.mean(found) < 0.05
