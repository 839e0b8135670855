import math
import re

import pytest

from ray_jobs.viewer.report import write_prm_page

EVIL = "<script>alert(1)</script>"


def make_quality(**changes):
    quality = {
        "num_tasks_held_out": 40,
        "num_steps": 1200,
        "num_invalid_steps": 7,
        "mse": 0.05,
        "mse_ci95": [0.04, 0.06],
        "mse_baseline_constant": 0.11,
        "mse_baseline_length": 0.09,
        "r2_over_constant": 0.5,
        "r2_over_constant_ci95": [0.4, 0.6],
        "r2_over_length": -3.0,
        "r2_over_length_ci95": [-4.0, -2.0],
        "spearman_overall": 0.61,
        "spearman_overall_ci95": [0.5, 0.7],
        "spearman_within_group": 0.31,
        "spearman_within_group_ci95": [0.2, 0.4],
        "spearman_within_group_baseline_length": 0.12,
        "pairwise_accuracy_within_group": 0.66,
        "pairwise_accuracy_within_group_ci95": [0.6, 0.7],
        "auroc_outcome": 0.8,
        "auroc_outcome_ci95": [0.7, 0.9],
        "auroc_outcome_baseline_constant": 0.5,
        "auroc_outcome_baseline_length": 0.55,
        "auroc_by_action": {"code": {"num_right": 40, "num_wrong": 12, "auroc": 0.65, "auroc_ci95": [0.5, 0.8]}},
        "ece": 0.03,
        "ece_ci95": [0.02, 0.05],
        "bias": -0.01,
        "bias_ci95": [-0.02, 0.01],
        "reliability": [
            {"count": 600, "mean_pred": 0.2, "mean_label": 0.25},
            {"count": 600, "mean_pred": 0.7, "mean_label": 0.68},
        ],
        "best_of_n": {
            "4": {
                "prm": 0.6,
                "random": 0.5,
                "oracle": 0.9,
                "gain": 0.1,
                "gain_ci95": [0.05, 0.15],
                "share_of_headroom": 0.25,
                "share_of_headroom_ci95": None,
            }
        },
        "spearman_score_length": 0.04,
        "spearman_score_length_ci95": [-0.1, 0.2],
        "share_min_on_last": 0.4,
        "share_min_on_last_ci95": [0.3, 0.5],
    }
    return quality | changes


@pytest.fixture
def page_of(tmp_path):
    """The page's body for these numbers."""

    def write(quality):
        page = write_prm_page(tmp_path, quality)
        return page.read_text(encoding="utf-8").partition("</style>")[2]

    return write


def words_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def test_numbers_stand_with_their_intervals_and_baselines(page_of):
    words = words_of(page_of(make_quality()))
    assert "tasks: 40" in words
    assert "95% interval 0.200 to 0.400; length 0.120 0.310" in words
    assert "95% interval 0.700 to 0.900; constant 0.500; length 0.550 0.800" in words
    assert "0.030 (95% interval 0.020 to 0.050); bias -0.010" in words
    assert "Best of 4: the PRM's pick is right in 60.0%" in words.replace("&#39;", "'")
    assert "25% (95% interval not defined)" in words
    assert "AUROC for a right code step (40 right, 12 wrong) 95% interval 0.500 to 0.800 0.650" in words


def test_diagram_has_a_dot_for_each_bin_and_the_diagonal(page_of):
    page = page_of(make_quality())
    assert page.count("<circle") == 2
    assert 'class="diagonal" d="M36.0 284.0L284.0 36.0"' in page
    assert "600 steps scored 0.20 on average, labelled 0.25" in page


def test_raw_scores_outside_of_0_and_1_stay_on_the_diagram(page_of):
    rows = [{"count": 1, "mean_pred": score, "mean_label": 0.5} for score in (-0.5, 1.5)]
    page = page_of(make_quality(reliability=rows))
    assert re.findall(r'cx="([\d.]+)"', page) == ["36.0", "284.0"]


def test_marks_never_leave_their_track(page_of):
    page = page_of(make_quality(spearman_overall=1.0, mse=0.0, mse_baseline_constant=5.0))
    places = [float(place) for place in re.findall(r"(?:left|right):(-?[\d.]+)%", page)]
    assert len(places) > 15
    assert all(0 <= place <= 100 for place in places)


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, EVIL])
def test_what_is_not_a_number_is_not_defined_and_never_0(page_of, nothing):
    values = make_quality()
    numbers = {key: nothing for key, value in values.items() if isinstance(value, int | float | list)}
    numbers["auroc_by_action"] = {"code": dict.fromkeys(values["auroc_by_action"]["code"], nothing)}
    page = page_of(values | numbers | {"reliability": None, "best_of_n": None})
    words = words_of(page)
    assert words.count("not defined") >= 20
    assert not re.search(r"\b0\.0|\bnan\b|\binf\b|None", words)
    assert "prm-point" not in page


def test_page_without_any_one_of_its_numbers_or_all_still_renders(page_of):
    quality = make_quality()
    for missing in quality:
        assert "None" not in page_of({key: value for key, value in quality.items() if key != missing})
    words = words_of(page_of({}))
    assert "Calibration: not defined." in words
    assert "Best of n: not defined." in words


def test_canaries_must_stay_below_the_limit(page_of):
    words = words_of(page_of(make_quality(canaries={"thanks": 0.1, "score this 1.0": 0.3, "empty think": None})))
    assert "thanks 0.100 below 0.3 ok" in words
    assert "score this 1.0 0.300 below 0.3 not ok" in words
    assert "empty think not defined below 0.3 not defined" in words
    assert "Junk" not in page_of(make_quality())


def test_hostile_text_is_escaped_and_nothing_comes_from_outside(page_of):
    hostile = {"canaries": {EVIL: 0.1}, "best_of_n": {EVIL: {"prm": EVIL}}, "auroc_by_action": {EVIL: {"auroc": EVIL}}}
    page = page_of(make_quality(num_steps=EVIL, **hostile))
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 3
    assert "http" not in page
