from reward.labels.search import CANDIDATES, Search, labels_as_scores
from reward.prm.step_text import step_texts
from rollout.types import Group, Reward
from tests.changed import replace
from tests.reward.test_step_text import decided, make_trajectory

FAR = make_trajectory(
    decided("search", "iron bolts", "47"),
    decided("think", "so"),
    decided("code", "3*4", "12"),
    decided("answer", "12"),
    answer="12",
)
NEAR = make_trajectory(decided("answer", "1"), answer="1")
DECISION = make_trajectory(decided("search", "iron bolts"), decided("think", "so"), answer=None)
ONE, TWO, THREE, FOUR = (step.digest for step in step_texts(FAR))
ALL_RIGHT = dict.fromkeys((ONE, TWO, THREE, FOUR), 1.0)
FIRST, *_, MOST = CANDIDATES


def test_attempt_with_the_most_right_steps_is_next_before_its_first_wrong_one():
    search = Search(attempts=[NEAR, FAR])
    assert search.next_state({ONE: 1.0, TWO: 0.5, THREE: 0.4}) == (FAR, 2, FIRST)


def test_steps_after_a_wrong_one_do_not_count():
    assert Search(attempts=[NEAR, FAR]).next_state({TWO: 1.0, THREE: 1.0}) == (NEAR, 0, FIRST)


def test_attempt_whose_steps_are_all_right_is_next_before_its_answer_and_a_decision_behind_it():
    assert Search(attempts=[NEAR, FAR]).next_state(ALL_RIGHT) == (FAR, 3, FIRST)
    labels = {step.digest: 1.0 for step in step_texts(DECISION)}
    assert Search(attempts=[NEAR, DECISION]).next_state(labels) == (DECISION, 2, FIRST)


def test_state_that_leads_nowhere_is_left_for_the_one_before():
    search, labels = Search(attempts=[FAR]), {ONE: 1.0, TWO: 1.0}
    visited = [search.next_state(labels)[1] for _ in range(3 * len(CANDIDATES) + 1)]
    assert visited[: len(CANDIDATES) + 1] == [2] * len(CANDIDATES) + [1]
    assert 0 not in visited[: 2 * len(CANDIDATES)]
    assert set(visited) == {0, 1, 2}


def test_state_gets_more_candidates_at_every_visit():
    search = Search(attempts=[FAR])
    assert [search.next_state({})[2] for _ in range(len(CANDIDATES) + 2)] == [*CANDIDATES, MOST, MOST]


def test_search_ends_at_a_right_attempt():
    search = Search(attempts=[NEAR])
    assert search.is_open
    right = Reward(outcome=1.0, total=1.0)
    search.attempts.append(replace(make_trajectory(decided("answer", "141")), reward=right))
    assert not search.is_open


def test_answer_that_proved_wrong_is_left_for_the_state_before_whatever_its_label_says():
    wrong = replace(FAR, reward=Reward(outcome=0.0, total=0.0))
    decision = replace(FAR, answer=None)
    search = Search(attempts=[wrong, decision])
    assert search.next_state(search.corrected(ALL_RIGHT))[1] == 3
    assert search.corrected(ALL_RIGHT) == {**ALL_RIGHT, FOUR: 0.0}
    assert Search(attempts=[FAR, decision]).corrected(ALL_RIGHT) == ALL_RIGHT


async def test_labels_are_scores_of_the_same_steps_of_other_attempts():
    scores = await labels_as_scores({ONE: 0.8, THREE: 0.2}, Group(id="g", trajectories=(FAR, NEAR)))
    assert scores.raw == ((0.8, None, 0.2, None), (None,))
