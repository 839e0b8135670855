import math

import pytest

from rollout.canary import LEAST_MOVE, LEAST_SHARE, MAX_MEAN_GAP, CanaryScores, canary_fault

BASE = (-1.0, -2.0, -3.0, -4.0)


def moved(logprobs, *steps):
    return tuple(logprob + step for logprob, step in zip(logprobs, steps, strict=True))


def make_scores(learner=BASE, *, engine=None):
    return CanaryScores(learner=learner, engine=learner if engine is None else engine)


def after(*, learner, engine):
    """The verdict on an engine that agreed with the learner about BASE, when both have moved by these steps since."""
    now = make_scores(moved(BASE, *learner), engine=moved(BASE, *engine))
    return canary_fault(now, make_scores())


def test_engine_that_says_what_the_learner_says_passes():
    assert canary_fault(make_scores()) is None
    assert after(learner=(0.5, 0.5, -0.5, 0.5), engine=(0.5, 0.5, -0.5, 0.5)) is None


def test_mean_gap_above_the_bound_is_a_fault_of_the_first_version_too():
    # 0.5, 0.5, 0 and 0.5 are 0.375 nats on average.
    fault = canary_fault(make_scores(engine=moved(BASE, 0.5, 0.5, 0.0, 0.5)))
    assert fault == "the engine's log-probs of the canary are 0.375 nats from the learner's (bound 0.25)"


def test_gaps_of_opposite_sign_do_not_cancel():
    assert "0.500 nats" in canary_fault(make_scores(engine=moved(BASE, 0.5, -0.5, 0.5, -0.5)))


def test_rounding_up_to_the_bound_passes():
    assert MAX_MEAN_GAP == 0.25
    assert canary_fault(make_scores(engine=moved(BASE, 0.25, -0.25, 0.25, -0.25))) is None


def test_base_weights_far_from_the_adapter_are_caught_by_the_gap():
    assert "1.000 nats" in canary_fault(make_scores(moved(BASE, 1, 1, 1, 1), engine=BASE))


def test_engine_that_went_on_with_the_weights_before_is_caught_though_they_are_within_the_gap():
    # The learner moved by sqrt(4 * 0.125 ** 2) = 0.25; the gap is 0.125.
    assert LEAST_MOVE == 0.25
    fault = after(learner=(0.125, -0.125, 0.125, 0.125), engine=(0, 0, 0, 0))
    assert fault == "the engine still samples with the version before: it moved by 0.000, the learner by 0.250"


@pytest.mark.parametrize(("engine", "caught"), [(0.015625, True), (0.03125, False), (0.25, False), (0.375, False)])
def test_engine_must_have_moved_by_a_tenth_of_what_the_learner_moved(engine, caught):
    # The learner moved by 0.25 in one token, the engine by 1/16, 1/8, all and one and a half of it.
    assert LEAST_SHARE == 0.1
    assert (after(learner=(0.25, 0, 0, 0), engine=(engine, 0, 0, 0)) is not None) == caught


def test_rounding_that_is_the_same_each_time_hides_nothing():
    rounding = (0.125, -0.125, 0.0625, 0.125)
    before = make_scores(engine=moved(BASE, *rounding))
    new = moved(BASE, 0.25, 0, 0, 0)
    assert canary_fault(make_scores(new, engine=moved(new, *rounding)), before) is None
    assert "the version before" in canary_fault(make_scores(new, engine=moved(BASE, *rounding)), before)


def test_versions_too_near_to_each_other_give_no_verdict():
    # sqrt(4 * 0.0625 ** 2) = 0.125 is below 0.25: rounding could hide it.
    assert after(learner=(0.0625, 0.0625, 0.0625, 0.0625), engine=(0, 0, 0, 0)) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_number_that_is_none_is_a_fault(bad):
    assert "nats from the learner's" in canary_fault(make_scores(engine=(*BASE[:3], bad)))
    assert "nats from the learner's" in canary_fault(make_scores(engine=(*BASE[:3], bad)), make_scores())
    assert "nats from the learner's" in canary_fault(make_scores((*BASE[:3], bad), engine=BASE))


def test_scores_of_another_text_are_an_error_and_no_verdict():
    with pytest.raises(ValueError, match="zip"):
        canary_fault(make_scores(engine=BASE[:3]))
    with pytest.raises(ValueError, match="dimensions"):
        canary_fault(make_scores(), make_scores(BASE[:3]))
