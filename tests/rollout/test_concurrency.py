from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.concurrency import ConcurrencyControl
from rollout.engines.engine import EngineLoad

TURNOVER = 6


def make_control(max_places, *, min_places=1, start=None):
    control = ConcurrencyControl(max_places, min_places=min_places, turnover=TURNOVER)
    control.places = control.places if start is None else start
    return control


def observe(control, *, kv_usage=0.3, num_preemptions=0, num_waiting=0, running=None):
    """By default a quiet engine and a worker that uses all its places."""
    load = EngineLoad(busy_s=0.0, kv_usage=kv_usage, num_waiting=num_waiting, num_preemptions=num_preemptions)
    return control.observe(load, control.places if running is None else running)


def turnovers(control, num, **reading):
    return [[observe(control, **reading) for _ in range(TURNOVER)][-1] for _ in range(num)]


def after_quiet_turnover(places):
    """A control at so many places, whose mark of preemptions is set and which may change at once."""
    control = make_control(100, start=places)
    turnovers(control, 1, kv_usage=0.7)
    return control


def test_a_free_engine_grows_by_a_quarter_and_at_least_one_per_turnover_up_to_the_most():
    control = make_control(12, start=2)
    assert turnovers(control, 9) == [3, 4, 5, 6, 7, 8, 10, 12, 12]


@pytest.mark.parametrize(
    ("places", "kv_usage", "more"),
    [
        *((50, 0.59, {}), (40, 0.6, {}), (40, 0.8, {}), (36, 0.81, {}), (36, 0.9, {}), (32, 0.91, {}), (32, 1.0, {})),
        # Places that are not used do not grow; a preemption cuts even where the cache looks free.
        *((40, 0.3, {"running": 39}), (32, 0.1, {"num_preemptions": 1})),
    ],
)
def test_usage_decides_between_growing_holding_trimming_and_cutting(places, kv_usage, more):
    assert observe(after_quiet_turnover(40), kv_usage=kv_usage, **more) == places


def test_it_trims_down_to_the_least_and_recovers_when_the_pressure_is_gone():
    control = make_control(8, min_places=2)
    assert turnovers(control, 9, kv_usage=0.85) == [7, 6, 5, 4, 3, 2, 2, 2, 2]
    assert turnovers(control, 7) == [3, 4, 5, 6, 7, 8, 8]


COUNTS = {"num_preemptions": st.integers(0, 5), "num_waiting": st.integers(0, 3), "running": st.integers(0, 60)}
readings = st.fixed_dictionaries({"kv_usage": st.floats(0, 1), **COUNTS})


@given(bounds=st.tuples(*[st.integers(1, 50)] * 3).map(sorted), history=st.lists(readings, max_size=80))
def test_places_stay_within_the_bounds_and_change_once_per_turnover(bounds, history):
    least, start, most = bounds
    control = make_control(most, min_places=least, start=start)
    places = [start, *(observe(control, **reading) for reading in history)]
    assert all(least <= one <= most for one in places)
    changes = [index for index in range(1, len(places)) if places[index] != places[index - 1]]
    assert all(later - earlier >= TURNOVER for earlier, later in pairwise(changes))


@given(bounds=st.tuples(st.integers(1, 50), st.integers(1, 50)).map(sorted), history=st.lists(readings, max_size=40))
def test_whatever_happened_a_free_engine_gets_back_to_the_most(bounds, history):
    least, most = bounds
    control = make_control(most, min_places=least)
    for reading in history:
        observe(control, **reading)
    assert turnovers(control, 25)[-1] == most
