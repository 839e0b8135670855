from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.concurrency import ConcurrencyControl

TURNOVER = 6


def make_control(max_places, *, min_places=1, start=None, turnover=TURNOVER):
    control = ConcurrencyControl(max_places, min_places=min_places, turnover=turnover)
    control.places = control.places if start is None else start
    return control


def observe(control, *, kv_usage=0.3, num_preemptions=0, num_waiting=0, running=None):
    """By default a quiet engine and a worker that uses all its places."""
    return control.observe(
        kv_usage=kv_usage,
        num_preemptions=num_preemptions,
        num_waiting=num_waiting,
        running=control.places if running is None else running,
    )


def turnovers(control, num, **reading):
    return [[observe(control, **reading) for _ in range(TURNOVER)][-1] for _ in range(num)]


def after_quiet_turnover(places, *, max_places=100):
    """A control at so many places, whose mark of preemptions is set and which may change at once."""
    control = make_control(max_places, start=places)
    turnovers(control, 1, kv_usage=0.7)
    return control


def test_it_begins_with_the_most():
    assert make_control(24).places == 24


def test_a_free_engine_grows_by_a_quarter_and_at_least_one_per_turnover_up_to_the_most():
    control = make_control(12, start=2)
    assert turnovers(control, 9) == [3, 4, 5, 6, 7, 8, 10, 12, 12]


def test_a_turnover_is_as_many_observations_as_its_caller_makes_in_one():
    control = make_control(20, start=8, turnover=2)
    assert [observe(control) for _ in range(5)] == [10, 10, 12, 12, 15]


def test_places_that_are_not_used_do_not_grow():
    control = make_control(20, start=8)
    assert turnovers(control, 3, running=7) == [8, 8, 8]


def test_a_queue_in_the_engine_forbids_growth_and_cuts_nothing():
    control = make_control(20, start=8)
    assert turnovers(control, 3, num_waiting=30) == [8, 8, 8]
    assert turnovers(control, 1) == [10]


@pytest.mark.parametrize(
    ("kv_usage", "places"), [(0.59, 50), (0.6, 40), (0.8, 40), (0.81, 36), (0.9, 36), (0.91, 32), (1.0, 32)]
)
def test_usage_decides_between_growing_holding_trimming_and_cutting(kv_usage, places):
    assert observe(after_quiet_turnover(40), kv_usage=kv_usage) == places


def test_a_preemption_cuts_even_where_the_cache_looks_free():
    assert observe(after_quiet_turnover(40), kv_usage=0.1, num_preemptions=1) == 32


def test_preemptions_from_before_the_first_observation_are_not_held_against_it():
    control = make_control(40)
    assert turnovers(control, 2, num_preemptions=1000) == [40, 40]


def test_a_burst_of_preemptions_cuts_once():
    control = after_quiet_turnover(40)
    burst = [observe(control, kv_usage=0.7, num_preemptions=count) for count in range(1, TURNOVER + 1)]
    assert burst == [32] * TURNOVER
    assert turnovers(control, 2, kv_usage=0.7, num_preemptions=TURNOVER) == [32, 32]


def test_preemptions_cut_again_no_sooner_than_a_turnover_later():
    control = after_quiet_turnover(40)
    places = [observe(control, kv_usage=0.7, num_preemptions=count) for count in range(1, 2 * TURNOVER + 2)]
    assert places == [32] * TURNOVER + [25] * TURNOVER + [20]


def test_the_excess_of_a_cut_runs_to_its_end_before_its_pressure_counts_again():
    control = after_quiet_turnover(40)
    observe(control, kv_usage=0.95)
    assert turnovers(control, 3, kv_usage=0.95, running=40) == [32, 32, 32]
    assert observe(control, kv_usage=0.95, running=32) == 32, "up to now more than the places may have run"
    assert observe(control, kv_usage=0.95, running=32) == 25


def test_a_cut_starts_from_what_ran_and_not_from_unused_places():
    control = after_quiet_turnover(40)
    observe(control, kv_usage=0.7, running=10)
    assert observe(control, kv_usage=0.95, running=10) == 8


def test_groups_that_ended_just_now_count_among_those_that_ran():
    control = after_quiet_turnover(40)
    observe(control, kv_usage=0.7, running=20)
    assert observe(control, kv_usage=0.7, num_preemptions=1, running=1) == 16


def test_pressure_without_groups_is_somebody_elses():
    control = after_quiet_turnover(40)
    observe(control, kv_usage=0.7, running=0)
    assert observe(control, kv_usage=0.99, num_preemptions=9, running=0) == 40


def test_it_trims_down_to_the_least_and_recovers_when_the_pressure_is_gone():
    control = make_control(8, min_places=2)
    assert turnovers(control, 9, kv_usage=0.85) == [7, 6, 5, 4, 3, 2, 2, 2, 2]
    assert turnovers(control, 7) == [3, 4, 5, 6, 7, 8, 8]


readings = st.fixed_dictionaries(
    {
        "kv_usage": st.floats(0, 1),
        "num_preemptions": st.integers(0, 5),
        "num_waiting": st.integers(0, 3),
        "running": st.integers(0, 60),
    }
)


@given(bounds=st.tuples(*[st.integers(1, 50)] * 3).map(sorted), history=st.lists(readings, max_size=80))
def test_places_stay_within_the_bounds_and_change_once_per_turnover(bounds, history):
    least, start, most = bounds
    control = make_control(most, min_places=least, start=start)
    places = [start, *(control.observe(**reading) for reading in history)]
    assert all(least <= one <= most for one in places)
    changes = [index for index in range(1, len(places)) if places[index] != places[index - 1]]
    assert all(later - earlier >= TURNOVER for earlier, later in pairwise(changes))


@given(bounds=st.tuples(st.integers(1, 50), st.integers(1, 50)).map(sorted), history=st.lists(readings, max_size=40))
def test_whatever_happened_a_free_engine_gets_back_to_the_most(bounds, history):
    least, most = bounds
    control = make_control(most, min_places=least)
    for reading in history:
        control.observe(**reading)
    assert turnovers(control, 25)[-1] == most
