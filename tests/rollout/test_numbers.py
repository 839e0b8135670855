import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.numbers import packed, packed_millionths, unpacked

WHOLE = st.integers(-(2**31), 2**31 - 1)
REAL = st.floats(allow_nan=False)


@given(
    st.lists(WHOLE)
    | st.lists(REAL)
    | st.lists(REAL, max_size=3).map(lambda few: few * 128)
    | st.lists(st.floats(width=32, allow_nan=False))
)
def test_packed_numbers_come_back_to_the_last_bit(values):
    assert unpacked(packed(values)).tolist() == values
    assert json.loads(json.dumps(packed(values))) == packed(values)


def test_numbers_take_as_few_bytes_as_hold_them_exactly():
    single = np.float32(-0.1).item()
    kinds = [packed(values)[:3] for values in ([single], [-0.1], [7], [2**16 - 1], [2**16], [-1], [])]
    assert kinds == ["f4=", "f8=", "u2=", "u2=", "i4=", "i4=", "u2="]


def test_only_many_numbers_that_zlib_makes_shorter_go_through_it():
    numbers = [-0.1] * 128
    assert [packed(numbers)[:3], packed(numbers[1:])[:3]] == ["f8:", "f8="]
    assert [packed_millionths(numbers)[:3], packed([2**20] * 128)[:3], packed([1] * 128)[:3]] == ["e6:", "i4:", "u2="]


def test_numbers_of_earlier_releases_are_read():
    assert unpacked("i4:eAFj52AAAwAAeAAQ").tolist() == [7, 8]
    assert unpacked("f4:eAFjYGBgOKBgfwAABKYB4A==").tolist() == [1.5, -2.5]


def test_whole_numbers_beyond_32_bits_are_refused():
    with pytest.raises(OverflowError, match="32 bits"):
        packed([2**31])


@given(st.lists(st.floats(-100, 0)))
def test_millionths_are_off_by_half_a_millionth_at_most(values):
    assert unpacked(packed_millionths(values)).tolist() == pytest.approx(values, abs=5.1e-7)


def test_what_has_no_millionths_is_nan():
    found = unpacked(packed_millionths([math.nan, -math.inf, -1e9, -2.5]))
    assert np.isnan(found).tolist() == [True, True, True, False]
    assert found[3] == -2.5


def test_plain_lists_are_read_as_they_are():
    assert unpacked([3, 4]).tolist() == [3, 4]
    assert unpacked([-0.5, None]).tolist() == pytest.approx([-0.5, math.nan], nan_ok=True)
    assert unpacked([]).tolist() == []


@pytest.mark.parametrize(
    "text", ["", "x4:AAAA", "f4!AAAA", "f4:####", "f4=AAAA", packed([0.1])[:-8], packed([2**20] * 200)[:-4]]
)
def test_what_is_torn_is_refused(text):
    with pytest.raises(ValueError, match=r"number|base64|reshape|padding"):
        unpacked(text)


def test_tokens_and_log_probs_take_a_third_of_their_digits():
    rng = np.random.default_rng(0)
    ids, logprobs = rng.integers(0, 32_000, 800), -rng.exponential(0.5, 800).astype(np.float32).astype(float)
    digits = json.dumps([ids.tolist(), logprobs.tolist(), logprobs.round(6).tolist()])
    short = packed(ids.tolist()) + packed_millionths(logprobs) + packed_millionths(logprobs)
    assert 3 * len(short) < len(digits)
