import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.task_choice import NUM_RECENT, Draw, FamilyOutcomes, LearnableChoice, Outcome, solve_rate, teaching

FOUR = ("chain", "lookup", "three_lookup", "two_lookup")


def outcome(task, right, scored, visit=1):
    """Of attempts that are right or wrong."""
    return Outcome(task, right, scored, 0 < right < scored, visit)


def ended(*outcomes):
    """Groups with so many (right, scored), the one drawn last first, of tasks with the numbers 0, 1, 2 and so on."""
    return [outcome(task, *one) for task, one in enumerate(outcomes)]


def known(**outcomes):
    """The outcomes of families: (right, scored) of their groups, the one drawn last first."""
    return lambda family: ended(*outcomes.get(family, []))


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


def test_the_rate_of_a_family_is_that_of_its_new_tasks():
    """Repeated tasks were chosen by how few of their attempts were right."""
    new, again = [outcome(task, 8, 8) for task in range(2)], [outcome(9, 1, 8, visit=2)] * 60
    choice = LearnableChoice(names=("lookup",), seed=0)
    assert choice.weights(lambda family: [*again, *new]) == choice.weights(lambda family: new)
    rows = [(number, one) for number, one in enumerate([*new, *again])]
    assert FamilyOutcomes({"lookup": rows, "chain": rows[2:]}).solve_rates() == {"lookup": 1.0}


# Tasks that are asked again.


def test_task_teaches_until_all_attempts_of_its_last_group_solve_it_or_it_was_asked_four_times():
    """Task 3 was solved by 2 of 8 and then by 6 of 8; task 5 by half, then by all; 6 by none; 8 could not be scored."""
    outcomes = [
        outcome(*one)
        for one in ((3, 6, 8, 2), (5, 8, 8, 2), (3, 2, 8), (5, 4, 8), (6, 0, 8), (7, 4, 8, 4), (8, 0, 0, 2), (8, 1, 8))
    ]
    partial = Outcome(9, 4.0, 8, False, 1)
    assert teaching("chain", [*outcomes, partial]) == {
        Draw("chain", 3, 3): 0.1 + 0.75 * 0.25,
        Draw("chain", 6, 2): 0.1,
        Draw("chain", 9, 2): 0.1,
    }


def test_three_of_four_draws_ask_a_task_that_teaches_again_by_how_much_it_teaches():
    """In each of 4,000 moments one draw is made: what is drawn is played, and not drawn again."""
    outcomes = known(lookup=[(4, 8), (8, 8), (0, 8)])
    drawn = [draw(outcomes, names=("lookup",), tasks=[task])[0] for task in range(4000)]
    repeats = Counter(one.repeats for one in drawn)
    assert repeats.keys() == {None, 0, 2}
    assert repeats[None] / 4000 == pytest.approx(0.25, abs=0.03)
    # 0.1 + 1/4 against 0.1.
    assert repeats[0] / (repeats[0] + repeats[2]) == pytest.approx(0.35 / 0.45, abs=0.03)


def play(num_groups, *, seed, num_in_play=12):
    """Play groups of eight of a family. Tasks with even numbers are solved by 35% of the attempts, others by none."""
    rng, outcomes = random.Random(seed), FamilyOutcomes({})
    choice, open_draws, played = LearnableChoice(names=("lookup",), seed=seed), [], []
    for number in range(num_groups):
        in_play = [one.played(task) for task, one in open_draws]
        draw_of = choice.by(outcomes.latest, in_play.copy)
        open_draws += [(task, draw_of(task)) for task in range(number + len(open_draws), number + num_in_play)]
        due, one = open_draws.pop(0)
        task = one.played(due)
        right = 0 if task % 2 else sum(rng.random() < 0.35 for _ in range(8))
        outcomes.add("lookup", number, outcome(task, right, 8, one.visit))
        played.append(task)
    return played, outcomes


def test_no_task_is_asked_more_than_four_times_and_none_is_starved_because_nobody_solves_it():
    """With unbounded repeats of what some attempts solve, and none of the rest, these are 22 times, 16% and 0.28."""
    runs = [play(400, seed=seed) for seed in range(5)]
    assert {max(Counter(played).values()) for played, _ in runs} == {4}
    unsolved = [sum(task % 2 for task in played) / 400 for played, _ in runs]
    assert min(unsolved) > 0.4
    # The mean of 0.35 and 0 over 8 new tasks of each run.
    shown = [outcomes.solve_rates()["lookup"] for _, outcomes in runs]
    assert sum(shown) / 5 == pytest.approx(0.175, abs=0.06)
