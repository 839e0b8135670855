from reward.labels.search import FIRST, VISITS_PER_STEP, Search
from reward.prm.step_text import step_texts
from tests.reward.test_step_text import decided, make_trajectory

FAR = make_trajectory(
    decided("search", "iron bolts", "47"),
    decided("think", "so"),
    decided("code", "3*4", "12"),
    decided("answer", "12"),
    answer="12",
)
NEAR = make_trajectory(decided("answer", "1"), answer="1")
ONE, TWO, THREE, _ = (step.digest for step in step_texts(FAR))


def test_attempt_with_the_most_right_steps_is_continued_before_its_first_wrong_one():
    search = Search(attempts=[NEAR, FAR])
    assert search.next_state({ONE: 1.0, TWO: 0.5, THREE: 0.4}) == (FAR, 2, FIRST)


def test_steps_after_a_wrong_one_do_not_count():
    assert Search(attempts=[NEAR, FAR]).next_state({TWO: 1.0, THREE: 1.0}) == (NEAR, 0, FIRST)


def test_attempt_whose_steps_are_all_right_is_continued_before_its_last():
    search = Search(attempts=[NEAR, FAR])
    assert search.next_state({step.digest: 1.0 for step in step_texts(FAR)}) == (FAR, 3, FIRST)


def test_state_that_leads_nowhere_is_left_for_the_one_before():
    search = Search(attempts=[FAR])
    visited = [search.next_state({ONE: 1.0, TWO: 1.0})[1] for _ in range(3 * VISITS_PER_STEP + 1)]
    assert visited[: VISITS_PER_STEP + 1] == [2] * VISITS_PER_STEP + [1]
    assert 0 not in visited[: 2 * VISITS_PER_STEP]
    assert set(visited) == {0, 1, 2}


def test_state_is_continued_twice_as_often_at_every_visit():
    search = Search(attempts=[FAR])
    assert [search.next_state({})[2] for _ in range(7)] == [4, 4, 8, 16, 32, 64, 64]


def test_search_ends_at_a_right_attempt():
    search = Search(attempts=[NEAR])
    assert search.is_open
    search.attempts.append(make_trajectory(decided("answer", "141")))
    assert not search.is_open
