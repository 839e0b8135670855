import pytest

from rollout.filters import bias_metrics, fresh_share, oldest_trained_version, version_ages


def make_groups(num, *, state="trained", seconds=1.0, tokens=100):
    return [(state, seconds, tokens)] * num


UNDISTURBED = {version: version for version in range(11)}
AGAIN = {0: 0, 1: 1, 2: 2, 3: 3, 4: 3, 5: 3, 6: 3, 7: 3, 8: 3}
"""Cut off five times after step 3, and each time published again."""
BACK_TO_1 = {0: 0, 1: 1, 2: 2, 3: 3, 4: 1, 5: 2}
BACK_TO_2 = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 2}
"""Steps 3 and 4 are taken back when the weights of step 2 are published again as version 5."""
MADE_AGAIN = {0: 0, 1: 1, 2: 2, 3: 3, 4: 2, 5: 3}


@pytest.mark.parametrize(
    ("published", "max_staleness", "oldest"),
    [
        *((UNDISTURBED, 8, 2), (UNDISTURBED, 0, 10), ({0: 0, 1: 1, 2: 2, 3: 3}, 8, -5)),
        *((AGAIN, 0, 3), (AGAIN, 2, 1), (AGAIN | {9: 4}, 0, 9)),
        # What was sampled for steps that were taken back may be trained when they are made again.
        *((BACK_TO_1, 0, 2), (BACK_TO_1 | {6: 3, 7: 4}, 0, 7)),
    ],
)
def test_oldest_trained_version_lags_by_the_cap_in_steps(published, max_staleness, oldest):
    assert oldest_trained_version(published, max_staleness=max_staleness) == oldest


@pytest.mark.parametrize(
    ("published", "oldest", "same_again", "ages"),
    [
        ({0: 0, 1: 1, 2: 2, 3: 3}, 1, False, {1: 2, 2: 1, 3: 0}),
        ({5: 0}, -3, False, {5: 0}),
        (MADE_AGAIN, 2, True, {2: 1, 3: 0, 4: 1, 5: 0}),
        (MADE_AGAIN, 2, False, {2: 1, 3: 1, 4: 1, 5: 0}),
        (BACK_TO_2, 2, False, {2: 0, 3: 1, 4: 2, 5: 0}),
        (BACK_TO_2 | {6: 3}, 2, False, {2: 1, 3: 1, 4: 1, 5: 1, 6: 0}),
        (BACK_TO_2 | {6: 3, 7: 4}, 2, False, {2: 2, 3: 1, 4: 1, 5: 2, 6: 1, 7: 0}),
    ],
)
def test_age_of_a_version_is_the_train_steps_since_it(published, oldest, same_again, ages):
    assert version_ages(published, oldest_version=oldest, same_again=same_again) == ages


def test_fresh_share_counts_the_tokens_of_versions_within_the_cap():
    versions = {3: 10, 4: 30, 6: 60}
    assert fresh_share(versions, ages={3: 3, 4: 2, 5: 1, 6: 0}) == 1
    assert fresh_share(versions, ages={4: 2, 5: 1, 6: 0}) == pytest.approx(0.9)
    assert fresh_share(versions, ages={6: 0, 5: 1}) == pytest.approx(0.6)
    assert fresh_share(versions, ages={7: 0}) == 0


def test_everything_trained_is_unbiased():
    groups = [("trained", float(second), 100) for second in range(1, 11)]
    assert bias_metrics(groups) == {"bias/length_trained_over_drawn": 1, "bias/slow_decile_share": pytest.approx(0.1)}


def test_slow_and_long_groups_that_never_reach_training_show_in_both_numbers():
    # 18 short and 2 long groups with signal; the long ones wait or are expired. Drawn: (18*100 + 2*600)/20 = 150.
    groups = make_groups(18) + make_groups(1, state="ready", seconds=9, tokens=600)
    groups += make_groups(1, state="expired", seconds=8, tokens=600)
    metrics = bias_metrics(groups)
    assert metrics["bias/length_trained_over_drawn"] == pytest.approx(100 / 150)
    assert metrics["bias/slow_decile_share"] == 0
