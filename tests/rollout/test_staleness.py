import pytest

from rollout.staleness import LEAST_FRESH_SHARE, bias_metrics, fresh_share, oldest_trained_version


def make_groups(num, *, state="trained", seconds=1.0, tokens=100):
    return [(state, seconds, tokens)] * num


def test_oldest_trained_version_lags_by_the_cap():
    assert oldest_trained_version(10, max_staleness=8) == 2
    assert oldest_trained_version(10, max_staleness=0) == 10
    assert oldest_trained_version(3, max_staleness=8) == -5


def test_fresh_share_counts_tokens_from_the_oldest_version_on():
    versions = {3: 10, 4: 30, 6: 60}
    assert fresh_share(versions, oldest_version=3) == 1
    assert fresh_share(versions, oldest_version=4) == pytest.approx(0.9)
    assert fresh_share(versions, oldest_version=5) == pytest.approx(0.6)
    assert fresh_share(versions, oldest_version=7) == 0


def test_group_that_sampled_nothing_is_fresh():
    assert fresh_share({}, oldest_version=5) == 1
    assert fresh_share({2: 0}, oldest_version=5) == 1


def test_a_tenth_is_the_least_fresh_share():
    assert LEAST_FRESH_SHARE == 0.1
    assert fresh_share({0: 90, 1: 10}, oldest_version=1) == pytest.approx(LEAST_FRESH_SHARE)


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


def test_slow_groups_that_are_trained_count_at_their_share():
    # 20 with signal, 150 tokens each; the two slowest are trained, two fast ones wait: 2 of 18 trained are slow.
    groups = make_groups(16) + make_groups(2, seconds=9, tokens=600) + make_groups(2, state="ready")
    metrics = bias_metrics(groups)
    assert metrics["bias/slow_decile_share"] == pytest.approx(2 / 18)
    assert metrics["bias/length_trained_over_drawn"] == pytest.approx((16 * 100 + 2 * 600) / 18 / 150)


def test_groups_without_signal_are_no_loss_to_training():
    groups = make_groups(10) + make_groups(5, state="all_wrong", seconds=99, tokens=9000)
    groups += [*make_groups(5, state="all_right", seconds=99, tokens=9000), ("failed", None, None)]
    assert bias_metrics(groups)["bias/length_trained_over_drawn"] == 1


def test_groups_of_the_batch_in_training_count_as_trained():
    assert bias_metrics(make_groups(5) + make_groups(5, state="in_batch"))["bias/length_trained_over_drawn"] == 1


def test_nothing_is_said_of_fewer_than_ten_trained_groups():
    assert bias_metrics([]) == {}
    assert bias_metrics(make_groups(9) + make_groups(50, state="ready")) == {}
    assert bias_metrics(make_groups(10)) != {}


def test_groups_without_a_token_do_not_divide_by_zero():
    assert bias_metrics(make_groups(10, tokens=0))["bias/length_trained_over_drawn"] == 0
