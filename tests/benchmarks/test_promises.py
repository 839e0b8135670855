"""The quick measurements of the promises hold, and a failing one is reported."""

import pytest

from benchmarks.promises import PROMISES, QUICK


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_promise_holds(name):
    result = PROMISES[name][1](0)
    assert result.holds, result.text
