import shutil
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout.store.choice import (
    NUM_RECENT,
    Draw,
    FixedChoice,
    LearnableChoice,
    Outcome,
    learnable_weight,
    solve_rate,
    teaching,
)
from rollout.store.ledger import Ledger
from rollout.store.lifecycle import GroupResult

from rollout.buffer import BufferSettings, GroupBuffer, WorkerStatus

FOUR = ("chain", "lookup", "three_lookup", "two_lookup")
TWO = ("chain", "lookup")


def outcome(task, right, scored):
    """Of attempts that are right or wrong."""
    return Outcome(task, right, scored, differed=0 < right < scored)


def ended(*outcomes):
    """Groups with so many (right, scored), the one drawn last first, of tasks with the numbers 0, 1, 2 and so on."""
    return [outcome(task, *one) for task, one in enumerate(outcomes)]


def known(**outcomes):
    """What the ledger would say of families: (right, scored) of their groups, the one drawn last first."""
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


# In the ledger.


@pytest.fixture
def path(tmp_path):
    (tmp_path / "first").mkdir()
    return tmp_path / "first" / "ledger.db"


def killed(path):
    """The files as they are at this moment, in another folder."""
    folder = path.parent.with_name(f"{path.parent.name}-killed")
    shutil.copytree(path.parent, folder)
    return folder / path.name


def make_result(right, scored=8, ending=None):
    ending = ending or {0: "all_wrong", scored: "all_right"}.get(right, "ready")
    return GroupResult(
        ending=ending, payload=b"bytes", versions={0: 1}, right=right, scored=scored, facts={"groups": 1.0}
    )


def lease(ledger, *families, worker=0):
    """A new group of each of these families, in this order."""
    return lease_draws(ledger, *map(Draw, families), worker=worker)


def lease_draws(ledger, *draws, worker=0):
    begin = ledger.next_task
    return ledger.lease(worker, len(draws), num_new=len(draws), draw_of=lambda task: draws[task - begin])


def of_another_family(task):
    return Draw("chain")


def settle(ledger, permit, right, *, now=1.0):
    result = make_result(right)
    ledger.settle(permit.lease, result.ending, result, now=now)


def test_permit_names_the_family_and_the_ledger_keeps_it():
    ledger = Ledger()
    permits = lease(ledger, "lookup", "chain")
    assert [permit.family for permit in permits] == ["lookup", "chain"]
    assert [permit for _, permit in ledger.leases()] == permits


def test_outcomes_stand_in_the_order_of_drawing_whoever_ended_first():
    ledger = Ledger()
    permits = lease(ledger, *["lookup"] * 3, "chain")
    for permit, right in zip(reversed(permits), (1, 8, 4, 0), strict=True):
        settle(ledger, permit, right)
    assert ledger.outcomes("lookup", 9) == [outcome(2, 8, 8), outcome(1, 4, 8), outcome(0, 0, 8)]
    assert ledger.outcomes("lookup", 2) == [outcome(2, 8, 8), outcome(1, 4, 8)]
    assert ledger.outcomes("chain", 9) == [outcome(3, 1, 8)]
    assert ledger.outcomes("branch", 9) == []


def test_group_that_ended_without_a_score_says_nothing_of_its_family():
    ledger = Ledger()
    permits = lease(ledger, "lookup", "lookup", "lookup")
    ledger.settle(permits[0].lease, None, make_result(0, scored=0), now=1.0)
    ledger.settle(permits[1].lease, None, make_result(1, scored=1), now=1.0)
    ledger.give_back(permits[2].lease, "worker lost", max_attempts=1)
    assert ledger.outcomes("lookup", 9) == [outcome(1, 1, 1)]


def test_attempts_differed_by_how_their_group_ended_and_not_by_its_rate():
    """Eight attempts with a fifth of the score each; as much in all, but not alike; and so, with some that were cut."""
    ledger = Ledger()
    for permit, ending in zip(lease(ledger, *["lookup"] * 3), ("all_right", "ready", "overlong"), strict=True):
        ledger.settle(permit.lease, ending, make_result(1.6, ending=ending), now=1.0)
    assert [one.differed for one in ledger.outcomes("lookup", 9)] == [True, True, False]
    assert teaching(ledger.outcomes("lookup", 9)) == {1: pytest.approx(0.16), 2: pytest.approx(0.16)}


def test_group_that_is_played_again_counts_once_and_keeps_its_family():
    ledger = Ledger()
    first, second = lease(ledger, "lookup", "lookup")
    settle(ledger, first, 8)
    ledger.run_again(second.lease)
    ledger.undo_open_rounds()
    assert ledger.outcomes("lookup", 9) == []
    again = ledger.lease(0, 2, num_new=0, draw_of=of_another_family)
    assert [permit.family for permit in again] == ["lookup", "lookup"]


def test_task_that_is_drawn_again_keeps_its_family():
    ledger = Ledger()
    (permit,) = lease(ledger, "lookup")
    settle(ledger, permit, 4)
    ledger.expire(0, "too old")
    (again,) = ledger.lease(0, 1, num_new=0, draw_of=of_another_family)
    assert (again.ordinal, again.task, again.family) == (1, 0, "lookup")


def test_repeated_task_is_made_of_the_first_ones_number_through_every_move():
    ledger = Ledger()
    first, second = lease_draws(ledger, Draw("lookup"), Draw("lookup", 0))
    assert [(one.task, one.made_of) for one in (first, second)] == [(0, 0), (1, 0)]
    assert ledger.open_tasks() == {0}
    ledger.run_again(second.lease)
    (queued,) = ledger.lease(0, 1, num_new=0, draw_of=of_another_family)
    assert (queued.task, queued.family, queued.made_of) == (1, "lookup", 0)
    settle(ledger, queued, 4)
    assert ledger.outcomes("lookup", 9) == [outcome(0, 4, 8)]
    ledger.expire(1, "too old")
    (again,) = ledger.lease(0, 1, num_new=0, draw_of=of_another_family)
    assert (again.ordinal, again.task, again.family, again.made_of) == (2, 1, "lookup", 0)
    assert [permit for _, permit in ledger.leases()] == [first, again]


def test_open_tasks_are_those_that_run_or_wait_to_run():
    ledger = Ledger()
    permits = lease_draws(ledger, *[Draw("lookup")] * 3, Draw("lookup", 7))
    settle(ledger, permits[0], 4)
    ledger.run_again(permits[1].lease)
    assert ledger.open_tasks() == {1, 2, 7}


def test_queued_group_of_which_no_family_is_known_gets_one_when_it_is_given_out():
    """As after a power cut took its row."""
    ledger = Ledger()
    (permit,) = ledger.lease(0, 1, num_new=1)
    assert permit.family is None
    ledger.run_again(permit.lease)
    (again,) = ledger.lease(0, 1, num_new=0, draw_of=of_another_family)
    assert again.family == "chain"
    assert ledger.leases() == [(0, again)]


def test_groups_that_ended_since_the_last_batch_are_counted_by_family():
    ledger = Ledger()
    permits = lease(ledger, "lookup", "lookup", "chain", "chain")
    for permit, right in zip(permits[:3], (4, 8, 0), strict=True):
        settle(ledger, permit, right)
    ledger.cut([0], 1)
    settle(ledger, permits[3], 4)
    ledger.cut([3], 2)
    assert ledger.families(1) == {"lookup": 2, "chain": 1}
    assert ledger.families(2) == {"chain": 1}


def test_solve_rate_of_a_family_is_that_of_its_last_groups_before_the_cut():
    """Of eight attempts each: lookup 4, then 8; chain 0; the last lookup, 2, ended after the cut."""
    ledger = Ledger()
    permits = lease(ledger, "lookup", "chain", "lookup", "lookup")
    for permit, right in zip(permits[:3], (4, 0, 8), strict=True):
        settle(ledger, permit, right)
    ledger.cut([0], 1)
    settle(ledger, permits[3], 2)
    assert ledger.solved(1, last=2) == {"lookup": 12 / 16, "chain": 0.0}
    assert ledger.solved(1, last=1) == {"lookup": 1.0, "chain": 0.0}
    ledger.cut([3], 2)
    assert ledger.solved(2, last=2) == {"lookup": 10 / 16, "chain": 0.0}


def test_what_is_believed_of_a_family_outlives_a_kill(path):
    ledger = Ledger(path)
    for number, permit in enumerate(lease(ledger, *TWO * 50)):
        settle(ledger, permit, number % 9)
    choice = LearnableChoice(names=TWO, seed=5)
    again = Ledger(killed(path))
    assert again.outcomes("chain", NUM_RECENT) == ledger.outcomes("chain", NUM_RECENT) != []
    assert choice.weights(again.outcomes) == choice.weights(ledger.outcomes)
    draws = [list(map(choice.by(one.outcomes, one.open_tasks), range(300))) for one in (again, ledger)]
    assert draws[0] == draws[1]
    assert any(one.repeats is not None for one in draws[0])


def test_looking_at_outcomes_reads_an_index_and_sorts_nothing():
    ledger = Ledger()
    said = ledger._db.execute(
        "EXPLAIN QUERY PLAN SELECT COALESCE(repeats, task), num_right, num_scored, state FROM groups WHERE family = ? "
        "AND num_scored > 0 ORDER BY ordinal DESC LIMIT ?",
        ("lookup", 64),
    ).fetchall()
    assert [row["detail"] for row in said] == ["SEARCH groups USING INDEX outcomes (family=?)"]


# In the buffer.


def make_buffer(ledger, choice, *, depth):
    settings = BufferSettings(batch_groups=4, pipeline_depth=depth, max_empty_batches=99)
    return GroupBuffer(settings, ledger, clock=lambda: 0.0, choice=choice)


async def admitted(buffer, *, worker=0, free_places=4):
    running = tuple(permit.lease for one, permit in buffer._ledger.leases() if one == worker)
    status = WorkerStatus(worker=worker, policy_version=0, running=running, free_places=free_places)
    return list((await buffer.admit(status, patience_s=0)).permits)


async def play_round(buffer, *, right_of):
    permits = await admitted(buffer)
    for permit in permits:
        await buffer.complete(permit.lease, make_result(right_of[permit.family]))
    return [permit.family for permit in permits]


async def test_draws_leave_what_is_always_solved():
    """None has signal, so that no batch ends the rounds: only what is believed of the families changes."""
    buffer = make_buffer(Ledger(), LearnableChoice(names=TWO, seed=0), depth=0)
    endings = {"chain": (4, "overlong"), "lookup": (8, "all_right")}
    drawn = []
    for _ in range(100):
        for permit in await admitted(buffer):
            right, ending = endings[permit.family]
            await buffer.complete(permit.lease, make_result(right, ending=ending))
            drawn.append(permit.family)
    # 0.35 against 0.1122: the mean of Beta(81, 1) is 0.9877.
    assert drawn.count("chain") / 400 == pytest.approx(0.35 / 0.4622, abs=0.06)


async def test_synchronous_round_is_chosen_as_things_were_when_it_began():
    """Whether a group of it ended before another worker asked for the rest changes nothing."""
    families = []
    for early in (True, False):
        buffer = make_buffer(Ledger(), LearnableChoice(names=TWO, seed=1), depth=0)
        await play_round(buffer, right_of={"chain": 0, "lookup": 0})
        buffer._admitter.proven[1] = 0
        first, second = await admitted(buffer, free_places=2)
        if early:
            await buffer.complete(first.lease, make_result(8))
        # To choose anew would fail.
        buffer._admitter._choose = None
        rest = await admitted(buffer, worker=1)
        assert len(rest) == 2
        families.append([(one.family, one.repeats) for one in (first, second, *rest)])
    assert families[0] == families[1]


async def test_synchronous_round_that_was_cut_off_repeats_the_same_tasks(path):
    """Killed after two of its four groups were given out, it draws the other two as it would have."""
    ledger = Ledger(path)
    buffer = make_buffer(ledger, LearnableChoice(names=("lookup",), seed=3), depth=0)
    for _ in range(4):
        for permit in await admitted(buffer):
            await buffer.complete(permit.lease, make_result(4, ending="overlong"))
    begun = await admitted(buffer, free_places=2)
    folder = killed(path)
    buffer._admitter.proven[1] = 0
    rest = await admitted(buffer, worker=1)
    again = make_buffer(Ledger(folder), LearnableChoice(names=("lookup",), seed=3), depth=0)
    await again.release(None, "killed")
    permits = await admitted(again)
    assert [(one.task, one.repeats) for one in permits] == [(one.task, one.repeats) for one in (*begun, *rest)]
    assert len({one.made_of for one in permits}) == 4
    assert sum(one.repeats is not None for one in permits) >= 2


async def test_asynchronous_choice_follows_each_group_that_ends():
    buffer = make_buffer(Ledger(), LearnableChoice(names=TWO, seed=0), depth=1)
    first, *_ = await admitted(buffer, free_places=2)
    before = [buffer._admitter._draw_of(task).family for task in range(300)]
    await buffer.complete(first.lease, make_result(8))
    await admitted(buffer, free_places=3)
    assert [buffer._admitter._draw_of(task).family for task in range(300)] != before


async def test_no_two_groups_play_a_task_at_the_same_time():
    buffer = make_buffer(Ledger(), LearnableChoice(names=("lookup",), seed=0), depth=1)
    running, num_repeats = [], 0
    for turn in range(60):
        running += await admitted(buffer, free_places=2)
        played = [one.made_of for one in running]
        assert len(played) == len(set(played))
        num_repeats += running[-1].repeats is not None
        await buffer.complete(running.pop(turn % len(running)).lease, make_result(4, ending="overlong"))
    assert num_repeats >= 10


async def test_batch_counts_every_family_that_there_is():
    choice = FixedChoice(names=("lookup", "chain", "branch"), family_of=lambda task: TWO[task % 2])
    buffer = make_buffer(Ledger(), choice, depth=0)
    assert await play_round(buffer, right_of={"chain": 4, "lookup": 4}) == ["chain", "lookup"] * 2
    batch = await buffer.next_batch(1)
    assert batch.families == {"lookup": 2, "chain": 2, "branch": 0}


async def test_where_nobody_chooses_permits_name_no_family():
    buffer = GroupBuffer(BufferSettings(batch_groups=2, pipeline_depth=0), Ledger())
    assert {permit.family for permit in await admitted(buffer)} == {None}
