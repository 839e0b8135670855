"""The quick measurements of the promises hold, and a failing one is reported."""

import pytest

from benchmarks import promises
from benchmarks.promises import PROMISES, QUICK, Measured


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_promise_holds(name):
    result = PROMISES[name][1](0)
    assert result.holds, result.text


def test_exit_code_reports_a_promise_that_does_not_hold(monkeypatch):
    monkeypatch.setattr(promises, "measure", lambda name, seed: Measured("text", holds=seed == 0))
    assert promises.main(["--only", "weights"]) == 0
    assert promises.main(["--only", "weights", "--seed", "1"]) == 1


def test_error_in_a_measurement_does_not_hold(monkeypatch):
    monkeypatch.setitem(PROMISES, "unknown", ("Statement", None))
    assert not promises.measure("unknown", 0).holds
