from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.task_choice import (
    NUM_RECENT,
    Draw,
    FixedChoice,
    LearnableChoice,
    Outcome,
    learnable_weight,
    solve_rate,
    teaching,
)

FOUR = ("chain", "lookup", "three_lookup", "two_lookup")
TWO = ("chain", "lookup")


def outcome(task, right, scored):
    """Of attempts that are right or wrong."""
    return Outcome(task, right, scored, differed=0 < right < scored)


def ended(*outcomes):
    """Groups with so many (right, scored), the one drawn last first, of tasks with the numbers 0, 1, 2 and so on."""
    return [outcome(task, *one) for task, one in enumerate(outcomes)]


def known(**outcomes):
    """The outcomes of families: (right, scored) of their groups, the one drawn last first."""
    return lambda family, last: ended(*outcomes.get(family, []))[:last]


def no_tasks():
    return set()


def draw(outcomes, *, names=FOUR, seed=0, tasks=range(2000), open_tasks=no_tasks):
    draw_of = LearnableChoice(names=names, seed=seed).by(outcomes, open_tasks)
    return [draw_of(task) for task in tasks]


def choose(outcomes, **rest):
    return [one.family for one in draw(outcomes, **rest)]


# Weights.


def test_rate_is_the_mean_of_a_beta_distribution_whose_counts_decay():
    assert solve_rate([]) == 0.5
    assert solve_rate(ended((8, 8))) == 9 / 10
    # The older group counts 0.9: 8 right of 8 + 7.2.
    assert solve_rate(ended((8, 8), (0, 8))) == pytest.approx(9 / 17.2)
    assert solve_rate(ended((0, 8), (8, 8))) == pytest.approx(8.2 / 17.2)
    assert solve_rate(ended((2, 4), (1, 4), (4, 4))) == pytest.approx(
        (1 + 2 + 0.9 + 0.81 * 4) / (2 + 4 * (1 + 0.9 + 0.81))
    )


def test_weight_is_the_floor_and_the_variance_of_an_outcome():
    assert [learnable_weight(rate) for rate in (0.0, 0.5, 0.9, 1.0)] == pytest.approx([0.1, 0.35, 0.19, 0.1])


def test_family_that_is_solved_half_the_time_has_the_most_weight_and_an_unknown_one_as_much():
    choice = LearnableChoice(names=FOUR, seed=0)
    weights = choice.weights(known(chain=[(0, 8)], lookup=[(8, 8)], two_lookup=[(4, 8)]))
    assert weights == pytest.approx({"chain": 0.19, "lookup": 0.19, "two_lookup": 0.35, "three_lookup": 0.35})


@given(
    st.fixed_dictionaries(
        dict.fromkeys(FOUR, st.lists(st.integers(1, 16).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))))
    )
)
def test_no_family_is_starved_whatever_comes_of_it(outcomes):
    weights = LearnableChoice(names=FOUR, seed=0).weights(known(**outcomes))
    assert min(weights.values()) >= 0.1
    assert min(weights.values()) / sum(weights.values()) >= 0.1 / (0.1 + 3 * 0.35)


def test_families_are_drawn_by_their_weights():
    hard = [(0, 8)] * NUM_RECENT
    drawn = Counter(choose(known(chain=hard, lookup=hard, three_lookup=hard, two_lookup=[(4, 8)]), tasks=range(8000)))
    # 0.1 + 0.0122 each: the mean of Beta(1, 1 + 79.9) is 0.0122; and 0.35.
    assert drawn["two_lookup"] / 8000 == pytest.approx(0.35 / (0.35 + 3 * 0.1121), abs=0.02)
    assert min(drawn.values()) / 8000 == pytest.approx(0.1121 / (0.35 + 3 * 0.1121), abs=0.02)


def test_number_seed_and_outcomes_decide_and_no_draw_before():
    outcomes = known(lookup=[(8, 8)])
    assert choose(outcomes, tasks=[7]) == [choose(outcomes)[7]]
    assert choose(outcomes) != choose(outcomes, seed=1)
    assert choose(known()) != choose(known(lookup=[(8, 8)] * NUM_RECENT))


# Tasks that are asked again.


def test_task_teaches_while_some_attempts_of_its_last_group_solve_it_and_others_do_not():
    """Task 3 was solved by 2 of 8 and then, drawn later, by 6 of 8; task 5 by half, and then by all."""
    outcomes = [outcome(*one) for one in ((3, 6, 8), (5, 8, 8), (3, 2, 8), (5, 4, 8), (6, 0, 8), (7, 4, 8))]
    assert teaching(outcomes) == {3: 0.75 * 0.25, 7: 0.25}


def test_task_does_not_teach_when_its_attempts_have_parts_of_a_score_that_are_equal():
    """A scorer of one's own gave each of eight attempts at task 3 a fifth; those at task 4 have as much, but differ."""
    assert teaching([Outcome(3, 1.6, 8, differed=False), Outcome(4, 1.6, 8, differed=True)]) == {4: pytest.approx(0.16)}


def test_three_of_four_draws_ask_a_task_that_teaches_again_by_how_much_it_teaches():
    """In each of 4,000 moments one draw is made: what is drawn is played, and not drawn again."""
    outcomes = known(lookup=[(4, 8), (8, 8), (1, 8)])
    drawn = [draw(outcomes, names=("lookup",), tasks=[task])[0] for task in range(4000)]
    repeats = Counter(one.repeats for one in drawn)
    assert repeats.keys() == {None, 0, 2}
    assert repeats[None] / 4000 == pytest.approx(0.25, abs=0.03)
    # 1/4 against 1/8 x 7/8 = 0.109375.
    assert repeats[0] / (repeats[0] + repeats[2]) == pytest.approx(0.25 / 0.359375, abs=0.03)


def test_task_that_is_played_is_not_drawn_beside_it():
    outcomes = known(lookup=[(4, 8), (4, 8)])
    drawn = draw(outcomes, names=("lookup",), open_tasks=lambda: {0})
    assert [one.repeats for one in drawn if one.repeats is not None] == [1]
    assert {one.repeats for one in draw(outcomes, names=("lookup",), open_tasks=lambda: {0, 1})} == {None}


def test_choice_knows_what_was_known_when_it_was_made_and_asks_once_for_each_family():
    asked, found = [], []

    def outcomes(family, last):
        asked.append(family)
        return list(found)

    draw_of = LearnableChoice(names=TWO, seed=0).by(outcomes, no_tasks)
    found.append(outcome(0, 4, 8))
    assert {draw_of(task).repeats for task in range(50)} == {None}
    assert sorted(asked) == ["chain", "lookup"]


def test_task_is_repeated_as_one_of_its_own_family():
    outcomes = {"lookup": [outcome(2, 4, 8)], "chain": [outcome(1, 4, 8)]}
    drawn = draw(lambda family, last: outcomes.get(family, []))
    assert {one for one in drawn if one.repeats is not None} == {Draw("lookup", 2), Draw("chain", 1)}


def test_fixed_shares_repeat_nothing():
    draw_of = FixedChoice(names=TWO, family_of=lambda task: TWO[task % 2]).by(known(lookup=[(4, 8)]), no_tasks)
    assert [draw_of(task) for task in range(3)] == [Draw("chain"), Draw("lookup"), Draw("chain")]
