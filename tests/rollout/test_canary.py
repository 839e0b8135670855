import math
import random

import pytest

from rollout.store.canary import (
    CLEAR_MOVE,
    CLEARLY_NEARER,
    LEAST_MOVE,
    LEAST_SHARE,
    MAX_MEAN_GAP,
    MAX_UNMOVED,
    CanaryScores,
    canary_fault,
    moved,
)

BASE = (-1.0, -2.0, -3.0, -4.0)
NUM_TOKENS = 75
LEARNER_ROUNDING, ENGINE_ROUNDING = 0.07, 0.08
"""Of one token, in nats: together they make the largest gap that was measured between the demo model's learner and
engine, 0.1 on average."""


def steps_on(logprobs, *steps):
    return tuple(logprob + step for logprob, step in zip(logprobs, steps, strict=True))


def make_scores(learner=BASE, *, engine=None, version=1):
    return CanaryScores(policy_version=version, learner=learner, engine=learner if engine is None else engine)


def after(*, learner, engine, versions=1):
    """The verdict on an engine that agreed with the learner about BASE, when both have moved by these steps since."""
    now = make_scores(steps_on(BASE, *learner), engine=steps_on(BASE, *engine), version=versions)
    return canary_fault(now, [make_scores(version=0)])


def test_engine_that_says_what_the_learner_says_passes():
    assert canary_fault(make_scores()) is None
    assert after(learner=(0.5, 0.5, -0.5, 0.5), engine=(0.5, 0.5, -0.5, 0.5)) is None


def test_mean_gap_above_the_bound_is_a_fault_of_the_first_version_too():
    # 0.5, 0.5, 0 and 0.5 are 0.375 nats on average.
    fault = canary_fault(make_scores(engine=steps_on(BASE, 0.5, 0.5, 0.0, 0.5)))
    assert fault == "the engine's log-probs of the canary are 0.375 nats from the learner's (bound 0.25)"


def test_gaps_of_opposite_sign_do_not_cancel():
    assert "0.500 nats" in canary_fault(make_scores(engine=steps_on(BASE, 0.5, -0.5, 0.5, -0.5)))


def test_rounding_up_to_the_bound_passes():
    assert MAX_MEAN_GAP == 0.25
    assert canary_fault(make_scores(engine=steps_on(BASE, 0.25, -0.25, 0.25, -0.25))) is None


def test_base_weights_far_from_the_adapter_are_caught_by_the_gap():
    assert "1.000 nats" in canary_fault(make_scores(steps_on(BASE, 1, 1, 1, 1), engine=BASE))


# The direction in which the engine moved.


def test_engine_that_did_not_move_where_rounding_cannot_be_the_reason_is_caught_at_once():
    fault = after(learner=(0.125, -0.125, 0.125, 0.125), engine=(0, 0, 0, 0))
    assert fault == (
        "the engine moved by 0.00 of the learner's way from version 0 (bound 0.5): it samples with other weights"
    )


@pytest.mark.parametrize(
    ("engine", "caught"),
    [(-0.25, True), (0.0, True), (0.125, True), (0.1875, False), (0.25, False), (0.375, False)],
)
def test_engine_must_have_moved_the_learners_way(engine, caught):
    assert (after(learner=(0.375, 0, 0, 0), engine=(engine, 0, 0, 0)) is not None) == caught


def test_movement_across_the_learners_way_does_not_count():
    assert "0.00 of the learner's way" in after(learner=(0.25, 0, 0, 0), engine=(0, 0.25, 0.25, 0))


def test_movement_that_rounding_could_hide_is_not_judged_by_its_direction():
    assert CLEAR_MOVE == 4.0
    before = make_scores(engine=steps_on(BASE, 0.125, 0, 0, 0), version=0)
    assert canary_fault(make_scores(steps_on(BASE, 0, 0.25, 0, 0), engine=before.engine), [before]) is None
    assert canary_fault(make_scores(steps_on(BASE, 0, 0.5, 0, 0), engine=before.engine), [before]) is not None


def test_the_base_model_is_named():
    base = make_scores(version=-1)
    fault = canary_fault(make_scores(steps_on(BASE, 0.5, 0, 0, 0), engine=BASE), [base])
    assert "from the base model" in fault


# An engine that does not move at all.


def rounded(*, versions):
    """Rounding moved the learner by 0.25, and the engine, as far from it as that, by nothing."""
    before = make_scores(engine=steps_on(BASE, 0.25, 0, 0, 0), version=3)
    now = make_scores(steps_on(BASE, 0, 0.25, 0, 0), engine=before.engine, version=3 + versions)
    return now, before


def test_engine_that_has_not_moved_is_unproven_and_after_some_versions_at_fault():
    assert (LEAST_MOVE, LEAST_SHARE, MAX_UNMOVED) == (0.25, 0.1, 8)
    for versions in range(1, MAX_UNMOVED):
        now, before = rounded(versions=versions)
        assert canary_fault(now, [before]) is None
        assert not moved(now, before)
    now, before = rounded(versions=MAX_UNMOVED)
    assert canary_fault(now, [before]) == (
        "the engine still samples as with version 3: it moved by 0.000, the learner by 0.250"
    )


def test_engine_that_moved_when_the_learner_did_is_proven():
    assert moved(make_scores(steps_on(BASE, 0.25, 0, 0, 0)), make_scores(version=0))
    assert not moved(make_scores(steps_on(BASE, 0.125, 0, 0, 0)), make_scores(version=0))
    assert after(learner=(0.125, 0, 0, 0), engine=(0, 0, 0, 0), versions=1000) is None


# The version that a reading speaks for.


def test_reading_that_is_another_versions_names_it():
    now = make_scores(steps_on(BASE, 0.375, 0.375, 0, 0), engine=steps_on(BASE, 0.0625, 0, 0, 0), version=9)
    fault = canary_fault(now, (), {-1: steps_on(BASE, -2, 0, 0, 0), 4: BASE, 9: now.learner})
    assert fault == (
        "the engine samples with version 4: its log-probs of the canary are 0.062 from the learner's with that, 0.488 "
        "from those with version 9"
    )


def test_versions_that_rounding_could_confuse_are_no_fault():
    assert CLEARLY_NEARER == 2.5
    engine = steps_on(BASE, 0.25, 0, 0, 0)
    now = make_scores(steps_on(BASE, 0.5625, 0, 0, 0), engine=engine, version=9)
    assert canary_fault(now, (), {4: BASE}) is None
    now = make_scores(steps_on(BASE, 0.625, 0, 0, 0), engine=engine, version=9)
    assert "samples with version 4" in canary_fault(now, (), {4: BASE})


def test_same_weights_under_another_number_are_no_fault():
    assert canary_fault(make_scores(version=9), [make_scores(version=8)], {8: BASE, 9: BASE}) is None


# With the rounding of a real engine and learner.


class Run:
    """Readings of versions that move by so much in one direction each, as learner and engine round them."""

    def __init__(self, *, step, seed, count=120):
        self.rng = random.Random(seed)
        start = [self.rng.uniform(-12, 0) for _ in range(NUM_TOKENS)]
        way = [self.rng.gauss(0, 1) for _ in range(NUM_TOKENS)]
        length = math.hypot(*way)
        self.exact = [
            [one + version * step * part / length for one, part in zip(start, way, strict=True)]
            for version in range(-1, count)
        ]
        self.learner = {version: self.rounded(version, LEARNER_ROUNDING) for version in range(-1, count)}

    def rounded(self, version, size):
        return [logprob + self.rng.gauss(0, size) for logprob in self.exact[version + 1]]

    def scores(self, version, served=None):
        engine = self.rounded(version if served is None else served, ENGINE_ROUNDING)
        return CanaryScores(policy_version=version, learner=self.learner[version], engine=engine)

    def published(self, version):
        return {one: logprobs for one, logprobs in self.learner.items() if one <= version}


STEPS = {1e-6: 0.0017, 1e-5: 0.017, 1e-4: 0.17, 1e-3: 1.7}
"""The demo run's ten versions at 2e-4 moved the text by 3.4 in all."""


def test_engine_close_to_the_learner_is_nearer_to_no_version_that_counts():
    """Then no other version is looked at: none can be the distance of LEAST_MOVE from the learner's."""
    rng = random.Random(0)
    for _ in range(200):
        learner = [rng.gauss(-2, 1) for _ in BASE]
        away = [rng.gauss(0, 1) for _ in BASE]
        off = 0.499 * LEAST_MOVE / math.hypot(*away)
        engine = [one + off * step for one, step in zip(learner, away, strict=True)]
        other = [one + rng.gauss(0, 0.3) * LEAST_MOVE for one in engine]
        nearer = math.dist(engine, other) < math.dist(engine, learner)
        assert not (nearer and math.dist(learner, other) >= LEAST_MOVE)
        assert canary_fault(make_scores(learner, engine=engine), (), {4: other}) is None


@pytest.mark.parametrize("step_size", STEPS)
@pytest.mark.parametrize("seed", range(5))
def test_healthy_engine_passes_always_restarted_or_not(step_size, seed):
    run = Run(step=STEPS[step_size], seed=seed)
    base = proven = run.scores(-1)
    for version in range(120):
        now = run.scores(version)
        assert canary_fault(now, [base, proven], run.published(version)) is None
        assert canary_fault(now, [run.scores(-1)], run.published(version)) is None
        proven = now if moved(now, proven) else proven


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("restarted", [False, True])
def test_engine_left_on_a_version_is_caught_once_the_text_has_moved_beyond_rounding(seed, restarted):
    run = Run(step=STEPS[1e-4], seed=seed)
    base, proven = run.scores(-1), run.scores(10)
    before = [base] if restarted else [base, proven]
    stuck = [canary_fault(run.scores(version, served=10), before, run.published(version)) for version in range(11, 60)]
    # 25 versions of 0.17 are 4.2: five times what rounding makes of 75 tokens.
    assert all(stuck[25:])


@pytest.mark.parametrize("step_size", STEPS)
def test_engine_whose_answers_stay_the_same_to_the_bit_is_caught_within_eight_versions(step_size):
    run = Run(step=STEPS[step_size], seed=0)
    base = proven = run.scores(-1)
    faults = []
    for version in range(MAX_UNMOVED):
        now = CanaryScores(policy_version=version, learner=run.learner[version], engine=base.engine)
        faults.append(canary_fault(now, [base, proven], run.published(version)))
        assert not moved(now, proven)
    assert faults[-1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_number_that_is_none_is_a_fault(bad):
    assert "nats from the learner's" in canary_fault(make_scores(engine=(*BASE[:3], bad)))
    assert "nats from the learner's" in canary_fault(make_scores(engine=(*BASE[:3], bad)), [make_scores()])
    assert "nats from the learner's" in canary_fault(make_scores((*BASE[:3], bad), engine=BASE))


def test_scores_of_another_text_are_an_error_and_no_verdict():
    with pytest.raises(ValueError, match="zip"):
        canary_fault(make_scores(engine=BASE[:3]))
    with pytest.raises(ValueError, match="dimensions"):
        canary_fault(make_scores(), [make_scores(BASE[:3])])
