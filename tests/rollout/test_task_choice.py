from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.task_choice import NUM_RECENT, LearnableChoice, Outcome, solve_rate, teaching

FOUR = ("chain", "lookup", "three_lookup", "two_lookup")


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


def test_three_of_four_draws_ask_a_task_that_teaches_again_by_how_much_it_teaches():
    """In each of 4,000 moments one draw is made: what is drawn is played, and not drawn again."""
    outcomes = known(lookup=[(4, 8), (8, 8), (1, 8)])
    drawn = [draw(outcomes, names=("lookup",), tasks=[task])[0] for task in range(4000)]
    repeats = Counter(one.repeats for one in drawn)
    assert repeats.keys() == {None, 0, 2}
    assert repeats[None] / 4000 == pytest.approx(0.25, abs=0.03)
    # 1/4 against 1/8 x 7/8 = 0.109375.
    assert repeats[0] / (repeats[0] + repeats[2]) == pytest.approx(0.25 / 0.359375, abs=0.03)
