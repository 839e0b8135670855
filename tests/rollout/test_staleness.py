import pytest

from rollout.filters import bias_metrics, fresh_share, oldest_trained_version, version_ages


def make_groups(num, *, state="trained", seconds=1.0, tokens=100):
    return [(state, seconds, tokens)] * num


def test_oldest_trained_version_lags_by_the_cap():
    undisturbed = {version: version for version in range(11)}
    assert oldest_trained_version(undisturbed, max_staleness=8) == 2
    assert oldest_trained_version(undisturbed, max_staleness=0) == 10
    assert oldest_trained_version({0: 0, 1: 1, 2: 2, 3: 3}, max_staleness=8) == -5


def test_weights_that_are_published_again_under_another_number_make_nothing_older():
    # Cut off five times after step 3, and each time published again.
    again = {0: 0, 1: 1, 2: 2, 3: 3, 4: 3, 5: 3, 6: 3, 7: 3, 8: 3}
    assert oldest_trained_version(again, max_staleness=0) == 3
    assert oldest_trained_version(again, max_staleness=2) == 1
    assert oldest_trained_version(again | {9: 4}, max_staleness=0) == 9


def test_what_was_sampled_for_steps_that_were_taken_back_may_be_trained_when_they_are_made_again():
    taken_back = {0: 0, 1: 1, 2: 2, 3: 3, 4: 1, 5: 2}
    assert oldest_trained_version(taken_back, max_staleness=0) == 2
    assert oldest_trained_version(taken_back | {6: 3, 7: 4}, max_staleness=0) == 7


def test_age_of_a_version_is_the_train_steps_since_it():
    assert version_ages({0: 0, 1: 1, 2: 2, 3: 3}, oldest_version=1) == {1: 2, 2: 1, 3: 0}
    assert version_ages({5: 0}, oldest_version=-3) == {5: 0}


def test_step_that_a_synchronous_run_makes_again_makes_nothing_older():
    made_again = {0: 0, 1: 1, 2: 2, 3: 3, 4: 2, 5: 3}
    assert version_ages(made_again, oldest_version=2, same_again=True) == {2: 1, 3: 0, 4: 1, 5: 0}
    assert version_ages(made_again, oldest_version=2) == {2: 1, 3: 1, 4: 1, 5: 0}


def test_a_step_that_was_taken_back_is_of_other_weights_than_the_same_step_made_again():
    """Steps 3 and 4 are taken back when the weights of step 2 are published again as version 5."""
    taken_back = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 2}
    assert version_ages(taken_back, oldest_version=2) == {2: 0, 3: 1, 4: 2, 5: 0}
    assert version_ages(taken_back | {6: 3}, oldest_version=2) == {2: 1, 3: 1, 4: 1, 5: 1, 6: 0}
    assert version_ages(taken_back | {6: 3, 7: 4}, oldest_version=2) == {2: 2, 3: 1, 4: 1, 5: 2, 6: 1, 7: 0}


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
