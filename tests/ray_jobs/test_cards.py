import json
import re

import pytest

from ray_jobs.viewer.report import scored_pair, turned_tasks, write_report
from rollout.codec import trajectory_line
from tests.ray_jobs.flat import trajectory_from


def make_turn(action, text, result=""):
    said = {"thought": "", "text": text, "format_error": None, "tool_error": None}
    return {"role": "planner", "action": action, "action_input": text, "result": result, **said}


def make_record(outcome, *steps, same=None):
    """Steps are (action, input, score)."""
    return {
        "outcome": outcome,
        "reward": outcome,
        "question": "82*81?",
        "gold": "6642",
        "answer": "6642" if outcome else "6724",
        "stop_reason": "answered",
        "turns": [make_turn(action, text, f"result of {text}") for action, text, _ in steps],
        "prm_scores": [score for *_, score in steps],
        "advantages": [0.5 if outcome else -0.5] * len(steps),
        **({} if same is None else {"same_steps": same}),
    }


@pytest.fixture
def words(tmp_path):
    """What a report of a run whose last scored group this is says."""

    def write(group):
        (tmp_path / "summary.json").write_text(json.dumps({"prm": {"mse": 0.1}}))
        lines = (trajectory_line(trajectory_from(record | {"group_id": "g"})) for record in group)
        (tmp_path / "trajectories.jsonl").write_bytes(b"".join(lines))
        page = write_report(tmp_path).read_text().partition("</style>")[2]
        return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))

    return write


def right(score):
    return make_record(1.0, ("search", "x", 0.8), ("code", "82*81", score), ("answer", "6642", 0.9))


def wrong(score, *, text="82*82"):
    return make_record(0.0, ("search", "x", 0.8), ("code", text, score), ("answer", "6724", 0.9))


GUESS = make_record(0.0, ("answer", "1", 0.1))


def test_pair_shown_is_the_middle_one_of_those_that_part_at_steps_of_one_action(words):
    group = [GUESS, right(0.5), wrong(0.1, text="1"), wrong(0.45, text="2"), wrong(0.7, text="3")]
    pair = scored_pair(group)
    assert list(pair.cards.values()) == [group[1], group[3]]
    assert pair.gaps == pytest.approx([-0.2, 0.05, 0.4])
    assert (pair.gap, pair.fork) == (pytest.approx(0.05), 1)
    said = words(group)
    assert "scored higher in 2 of them" in said
    assert "they part at step 2, where the right one scored 0.05 higher" in said
    assert "score 0.45" in said
    assert "score 0.10" not in said


def test_pair_that_the_prm_ranks_wrongly_is_said_to_be_so(words):
    assert "the right one scored 0.25 lower" in words([right(0.5), wrong(0.75)])


def test_a_pair_with_equal_scores_is_not_called_higher_or_lower(words):
    said = words([right(0.5), wrong(0.5)])
    assert "they part at step 2, where both scored alike." in said
    assert "0.00" not in said


def test_a_blank_answer_is_called_none(words):
    assert "Answer: no answer (answered) , the reference is 6642" in words([right(0.5), wrong(0.1) | {"answer": " "}])


def test_characters_that_hide_or_turn_what_is_read_are_written_out(words):
    said = words([right(0.5), wrong(0.1) | {"answer": "67\u202e24", "question": "82*81\x1b[2J?"}])
    assert "67⟨U+202E⟩24 , the reference is 6642" in said
    assert "82*81⟨U+001B⟩[2J?" in said
    assert not {"\u202e", "\x1b"} & set(said)


def test_pairs_that_part_at_different_actions_or_without_a_score_are_not_compared(words):
    for group in ([right(0.5), GUESS], [right(0.5), wrong(None)]):
        assert scored_pair(group).gap is None
        assert "no step can be compared" in words(group)


def test_a_sibling_with_a_part_of_the_score_is_a_wrong_one():
    """Regression: a group of nothing else had no pair. One that could not be scored is neither right nor wrong."""
    part, unscored = wrong(0.2) | {"outcome": 0.5}, wrong(0.1) | {"outcome": None}
    pair = scored_pair([unscored, right(0.5), part])
    assert list(pair.cards.values()) == [right(0.5), part]
    assert pair.gaps == pytest.approx([0.3])


def test_step_that_siblings_made_too_has_all_its_advantages(words):
    same = [[0.9251, 0.9251, -1.2345], [0.1], [0.2, 0.2]]
    record = make_record(1.0, ("search", "x", 0.8), ("code", "82*81", 0.7), ("answer", "6642", 0.9), same=same)
    said = words([record, wrong(0.1)])
    assert "3 attempts made this very step in the same state: +0.93 ×2, -1.23 ×1; mean +0.21" in said
    assert "2 attempts made this very step in the same state: +0.20 ×2" in said
    assert "1 attempts" not in said


def test_group_without_a_right_attempt_shows_what_there_is(words):
    assert list(scored_pair([GUESS]).cards.values()) == [GUESS]
    assert "An attempt of the group" in words([GUESS])


def test_a_task_is_wrong_where_its_score_is_less_than_one_and_neither_where_it_has_none():
    """Regression: parts of a score counted as wrong everywhere but here."""
    before = {"a": 0.5, "b": 1.0, "c": 0.0, "d": None, "e": 1.0}
    after = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 1.0, "e": None}
    turned = turned_tasks(*({id: {"reward": reward} for id, reward in one.items()} for one in (before, after)))
    assert (turned.gained, turned.lost, turned.failed) == (1, 1, 2)
    assert [one["reward"] for one in turned.cards.values()] == [0.5, 1.0, 0.5]
