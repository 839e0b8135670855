import re

from ray_jobs.pages.trajectory_cards import scored_cards


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


def words_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def right(score):
    return make_record(1.0, ("search", "x", 0.8), ("code", "82*81", score), ("answer", "6642", 0.9))


def wrong(score, *, text="82*82"):
    return make_record(0.0, ("search", "x", 0.8), ("code", text, score), ("answer", "6724", 0.9))


GUESS = make_record(0.0, ("answer", "1", 0.1))


def test_pair_shown_is_the_middle_one_of_those_that_part_at_steps_of_one_action():
    words = words_of(
        scored_cards([GUESS, right(0.5), wrong(0.1, text="1"), wrong(0.45, text="2"), wrong(0.7, text="3")])
    )
    assert "3 pairs of a right and a wrong attempt" in words
    assert "scored higher in 2 of them" in words
    assert "they part at step 2, where the right one scored 0.05 higher" in words
    assert "PRM score 0.45" in words
    assert "PRM score 0.10" not in words


def test_pair_that_the_prm_ranks_wrongly_is_said_to_be_so():
    words = words_of(scored_cards([right(0.5), wrong(0.75)]))
    assert "scored higher in 0 of them" in words
    assert "the right one scored 0.25 lower" in words


def test_pairs_that_part_at_different_actions_or_without_a_score_are_not_compared():
    for group in ([right(0.5), GUESS], [right(0.5), wrong(None)]):
        words = words_of(scored_cards(group))
        assert "no step can be compared" in words
        assert "A right attempt" in words


def test_step_that_siblings_made_too_has_all_its_advantages():
    same = [[0.9251, 0.9251, -1.2345], [0.1], [0.2, 0.2]]
    record = make_record(1.0, ("search", "x", 0.8), ("code", "82*81", 0.7), ("answer", "6642", 0.9), same=same)
    words = words_of(scored_cards([record, wrong(0.1)]))
    assert "3 attempts made this very step in the same state: +0.93 ×2, -1.23 ×1; mean +0.21" in words
    assert "2 attempts made this very step in the same state: +0.20 ×2" in words
    assert "1 attempts" not in words


def test_group_without_a_right_attempt_shows_what_there_is():
    assert "An attempt of the group" in scored_cards([GUESS])
