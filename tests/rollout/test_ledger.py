import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rollout.store.ledger import Ledger
from rollout.store.ledger_file import LedgerError
from rollout.store.lifecycle import MOVES, GroupCounts, GroupResult

KILLED_WRITER = """
import sys
from pathlib import Path
from rollout.store.ledger import Ledger
from rollout.store.lifecycle import GroupResult

ledger = Ledger(Path(sys.argv[1]))
result = GroupResult(ending="ready", payload=b"bytes", versions={0: 10}, facts={"groups": 1})
while True:
    for permit in ledger.lease(0, 4, num_new=4):
        ledger.settle(permit.lease, "ready", result, now=0.0)
        print(permit.ordinal, flush=True)
"""


def make_result(payload=b"bytes", **changes):
    values = {"ending": "ready", "payload": payload, "versions": {0: 10}, "duration_s": 1.0, "facts": {"groups": 1}}
    return GroupResult(**(values | changes))


def lease_new(ledger, num, *, worker=0):
    return ledger.lease(worker, num, num_new=num)


def run(ledger, *endings, now=1.0):
    """Lease a new group for each ending and bring it there; its payload is its ordinal."""
    for permit, ending in zip(lease_new(ledger, len(endings)), endings, strict=True):
        ledger.settle(permit.lease, ending, make_result(b"%d" % permit.ordinal), now=now)


def train(ledger, step, *, num=2):
    """Draw the step's batch and train it."""
    run(ledger, *["ready"] * num)
    ledger.cut([ordinal for (ordinal, _), _ in ledger.ready()], step)
    ledger.mark_trained(step)


def make_ledger_with_groups_in_every_state(path):
    """0-1 trained in step 1, 2 in the batch of step 2, 3 ready, 4 filtered, 5 failed, 6 expired, 7 running, 8 queued
    of the task of 6."""
    ledger = Ledger(path)
    train(ledger, 1)
    run(ledger, "ready", "ready", "all_wrong")
    ledger.cut([2], 2)
    (failed,) = lease_new(ledger, 1)
    ledger.give_back(failed.lease, "worker lost", max_attempts=1)
    run(ledger, "ready")
    ledger.lease(1, 1, num_new=1)
    ledger.expire(6, "too old")
    return ledger


def in_file(path):
    """What another process reads in the ledger's file."""
    other = sqlite3.connect(path)
    groups = other.execute("SELECT * FROM groups ORDER BY ordinal").fetchall()
    payloads = other.execute("SELECT * FROM payloads ORDER BY ordinal").fetchall()
    other.close()
    return groups, payloads


def closed(ledger, path):
    ledger.close()
    return Ledger(path)


def killed(ledger, path):
    """Nothing was closed: the files are what they were in the moment of a kill -9."""
    copy = path.with_name("copy") / path.name
    copy.parent.mkdir()
    for file in path.parent.glob(path.name + "*"):
        if not file.name.endswith("-shm"):
            shutil.copy(file, copy.parent)
    return Ledger(copy)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


# Drawing and running.


def test_new_groups_are_of_the_next_tasks(path):
    ledger = Ledger(path)
    assert [(permit.ordinal, permit.task, permit.attempt) for permit in lease_new(ledger, 2)] == [(0, 0, 1), (1, 1, 1)]
    assert [permit.task for permit in ledger.lease(0, 5, num_new=1)] == [2]
    assert ledger.next_task == 3


def test_queued_groups_go_out_before_new_tasks_and_take_their_places():
    ledger = Ledger()
    first, second = lease_new(ledger, 2)
    ledger.give_back(second.lease, "lost", max_attempts=3)
    ledger.give_back(first.lease, "lost", max_attempts=3)
    permits = ledger.lease(1, 3, num_new=5)
    assert [(permit.task, permit.attempt) for permit in permits] == [(0, 2), (1, 2), (2, 1)]


def test_queued_task_is_drawn_again_as_a_new_group_before_any_other():
    ledger = Ledger()
    run(ledger, "ready", "ready")
    ledger.expire(0, "too old")
    permits = lease_new(ledger, 2)
    assert [(permit.ordinal, permit.task, permit.attempt) for permit in permits] == [(2, 0, 2), (3, 2, 1)]
    assert ledger.next_task == 3
    assert ledger.reasons() == {"too old": 1}


def test_ledger_knows_who_runs_what():
    ledger = Ledger()
    first, second = lease_new(ledger, 2, worker=7)
    (other,) = lease_new(ledger, 1, worker=8)
    assert ledger.leases() == [(7, first), (7, second), (8, other)]
    ledger.settle(second.lease, "all_right", make_result(), now=1)
    ledger.give_back(other.lease, "lost", max_attempts=3)
    assert ledger.leases() == [(7, first)]


def test_group_that_was_given_back_runs_as_its_next_attempt():
    ledger = Ledger()
    (first,) = lease_new(ledger, 1, worker=7)
    assert ledger.give_back(first.lease, "lost", max_attempts=2) == "queued"
    (second,) = ledger.lease(8, 1, num_new=0)
    assert (first.lease, second.lease) == ((0, 1), (0, 2))
    assert ledger.leases() == [(8, second)]


def test_attempts_before_a_task_was_drawn_again_for_its_age_are_counted_once():
    """Regression: every group of such a row counted all that were before it, here 1 + 2 + 3."""
    ledger = Ledger()
    (permit,) = lease_new(ledger, 1)
    ledger.give_back(permit.lease, "lost", max_attempts=9)
    for ordinal in range(3):
        (permit,) = ledger.lease(0, 1, num_new=0)
        ledger.settle(permit.lease, "ready", make_result(), now=ordinal + 1)
        if ordinal < 2:
            ledger.expire(ordinal, "too old")
    assert permit.attempt == 4
    assert ledger.num_requeued() == 3


def test_group_given_back_at_its_last_attempt_has_failed_with_the_reason():
    ledger = Ledger()
    (permit,) = lease_new(ledger, 1)
    assert ledger.give_back(permit.lease, "worker lost", max_attempts=2) == "queued"
    assert ledger.num_requeued() == 1
    (permit,) = ledger.lease(0, 1, num_new=0)
    assert ledger.give_back(permit.lease, "out of memory", max_attempts=2) == "failed"
    assert ledger.verify() == GroupCounts(drawn=1, failed=1)
    assert ledger.reasons() == {"out of memory": 1}
    assert lease_new(ledger, 1)[0].task == 1


def held(path):
    return [row[0] for row in sqlite3.connect(path).execute("SELECT ordinal FROM payloads ORDER BY ordinal")]


def test_bytes_are_kept_of_groups_that_will_be_trained_and_of_four_without_signal_per_step(path):
    ledger = Ledger(path)
    run(ledger, *["all_right", "all_wrong"] * 3, "ready")
    assert held(path) == [0, 1, 2, 3, 6]
    ledger.cut([6], step=1)
    assert [(state, payload) for state, _, payload in ledger.untrained(1)] == [
        ("all_right", b"0"),
        ("all_wrong", b"1"),
        ("all_right", b"2"),
        ("all_wrong", b"3"),
    ]
    run(ledger, "all_wrong", "ready")
    assert held(path) == [0, 1, 2, 3, 6, 7, 8]
    assert ledger.untrained(2) == []


def test_group_without_signal_is_shown_again_after_a_rewind_and_forgotten_with_its_step(path):
    ledger = Ledger(path)
    run(ledger, "all_wrong", "ready")
    ledger.cut([1], step=1)
    ledger.rewind(0)
    ledger.cut([1], step=1)
    assert ledger.untrained(1) == [("all_wrong", "", b"0")]
    ledger.mark_trained(1)
    ledger.forget(1)
    assert held(path) == []


# Training.


def test_ready_groups_come_oldest_weights_first_then_in_the_order_of_drawing():
    ledger = Ledger()
    versions = [{5: 1}, {3: 1, 6: 9}, {5: 4}, {4: 2}, {}]
    for permit, sampled in zip(lease_new(ledger, 5), versions, strict=True):
        ledger.settle(permit.lease, "ready", make_result(versions=sampled), now=1)
    assert [ordinal for (ordinal, _), _ in ledger.ready()] == [4, 1, 3, 0, 2]
    assert ledger.ready()[1][1] == {3: 1, 6: 9}


def test_batch_is_the_bytes_of_its_groups_until_it_is_trained():
    ledger = Ledger()
    run(ledger, "ready", "ready", "ready")
    ledger.cut([2, 0], 1)
    assert ledger.batch(1) == ledger.batch(1) == [b"0", b"2"]
    assert ledger.batch(2) == []
    ledger.mark_trained(1)
    ledger.mark_trained(1)
    assert ledger.batch(1) == []
    assert ledger.trained_tasks() == [0, 2]
    assert ledger.verify() == GroupCounts(drawn=3, ready=1, trained=2)


def test_rewinding_makes_later_batches_ready_again_with_their_bytes_and_trains_earlier_ones():
    ledger = Ledger()
    train(ledger, 1)
    train(ledger, 2)
    run(ledger, "ready", "ready")
    ledger.cut([4], 3)
    ledger.rewind(1)
    assert [ordinal for (ordinal, _), _ in ledger.ready()] == [2, 3, 4, 5]
    assert ledger.trained_tasks() == [0, 1]
    ledger.cut([2, 3, 4, 5], 2)
    assert ledger.batch(2) == [b"2", b"3", b"4", b"5"]
    ledger.rewind(2)
    assert ledger.trained_tasks() == [0, 1, 2, 3, 4, 5]


def test_rewinding_to_a_refused_step_leaves_its_batch_refused_and_makes_a_later_one_ready_again():
    ledger = Ledger()
    run(ledger, "ready", "ready", "ready")
    for step in (1, 2):
        ledger.cut([step - 1], step)
        ledger.mark_trained(step, refused="the loss is not finite")
    ledger.rewind(1)
    assert ledger.verify() == GroupCounts(drawn=3, ready=2, refused=1)
    ledger.cut([1], 2)
    assert ledger.batch(2) == [b"1"]


def test_bytes_of_refused_groups_are_forgotten_as_those_of_trained_ones():
    ledger = Ledger()
    run(ledger, "ready")
    ledger.cut([0], 1)
    ledger.mark_trained(1, refused="the loss is not finite")
    ledger.forget(1)
    with pytest.raises(LedgerError, match=r"group 0\b.* is lost: its bytes were forgotten"):
        ledger.rewind(0)


def test_rewinding_twice_is_rewinding_once(path):
    ledger = Ledger(path)
    train(ledger, 1)
    train(ledger, 2)
    ledger.rewind(1)
    once = in_file(path)
    ledger.rewind(1)
    assert in_file(path) == once


def test_bytes_are_forgotten_only_up_to_the_step():
    ledger = Ledger()
    for step in (1, 2, 3):
        train(ledger, step, num=1)
    ledger.forget(1)
    ledger.rewind(1)
    ledger.cut([1, 2], 2)
    assert ledger.batch(2) == [b"1", b"2"]


def test_bytes_are_forgotten_a_few_at_a_time(path):
    ledger = Ledger(path)
    run(ledger, "all_wrong", "ready", "ready")
    ledger.cut([1, 2], 1)
    ledger.mark_trained(1)
    assert [ledger.forget(1, at_most=2) for _ in range(3)] == [2, 1, 0]
    assert held(path) == []


def test_bytes_of_groups_that_are_not_trained_yet_are_never_forgotten():
    ledger = Ledger()
    train(ledger, 1, num=1)
    run(ledger, "ready", "ready")
    ledger.cut([1], 2)
    ledger.forget(9)
    assert ledger.batch(2) == [b"1"]
    ledger.rewind(1)
    ledger.cut([1, 2], 2)
    assert ledger.batch(2) == [b"1", b"2"]


def test_rewinding_beyond_forgotten_bytes_is_an_error_and_changes_nothing(path):
    ledger = Ledger(path)
    for step in (1, 2, 3):
        train(ledger, step, num=1)
    ledger.forget(2)
    before = in_file(path)
    with pytest.raises(
        LedgerError, match=r"group 1\b.* is lost: its bytes were forgotten .*; put a newer one back .*/, or begin anew"
    ):
        ledger.rewind(1)
    assert in_file(path) == before
    assert ledger.verify() == GroupCounts(drawn=3, trained=3)
    ledger.rewind(2)
    assert [ordinal for (ordinal, _), _ in ledger.ready()] == [2]


# Facts.


def test_facts_are_reported_with_the_first_batch_that_is_cut_after_their_group_ended():
    ledger = Ledger()
    run(ledger, "ready", "all_wrong")
    ledger.cut([0], 1)
    run(ledger, "all_right", "ready", "ready")
    assert (ledger.reported(1), ledger.reported(2)) == ({"groups": 2}, {})
    ledger.mark_trained(1)
    ledger.cut([3], 2)
    assert (ledger.reported(1), ledger.reported(2), ledger.reported()) == ({"groups": 2}, {"groups": 3}, {"groups": 5})


def test_facts_are_added_up_name_by_name():
    ledger = Ledger()
    first, second = lease_new(ledger, 2)
    ledger.settle(first.lease, "ready", make_result(facts={"turns": 3, "reward": 0.5}), now=1)
    ledger.settle(second.lease, "all_wrong", make_result(facts={"turns": 2, "errors": 1}), now=1)
    ledger.cut([0], 1)
    assert ledger.reported(1) == {"turns": 5, "reward": 0.5, "errors": 1}


def test_group_that_failed_for_good_leaves_its_numbers_behind():
    ledger = Ledger()
    run(ledger, "ready")
    (permit,) = lease_new(ledger, 1)
    ledger.settle(permit.lease, None, make_result(ending=None, reason="judge down"), now=1)
    ledger.cut([0], 1)
    assert ledger.reported(1) == {"groups": 2}
    assert ledger.reasons() == {"judge down": 1}


def test_steps_that_are_made_again_report_what_they_reported_and_what_ended_since(path):
    """Regression: the first of them reported all, and a monitor of such rows decided otherwise than without a crash."""
    ledger = Ledger(path)
    for step, endings in ((1, ["ready", "all_wrong"]), (2, ["ready"]), (3, ["ready", "all_right", "all_right"])):
        run(ledger, *endings)
        ledger.cut([ordinal for (ordinal, _), _ in ledger.ready()], step)
        ledger.mark_trained(step)
    assert [ledger.reported(step)["groups"] for step in (1, 2, 3)] == [2, 1, 3]
    run(ledger, "all_wrong")
    ledger.rewind(1)
    ledger = closed(ledger, path)
    ledger.cut([2], 2)
    ledger.cut([3], 3)
    assert [ledger.reported(step)["groups"] for step in (1, 2, 3)] == [2, 2, 3]
    assert ledger.reported() == {"groups": 7}


def test_durations_are_of_the_groups_that_ended_last():
    ledger = Ledger()
    for now, permit in enumerate(lease_new(ledger, 3)):
        ledger.settle(permit.lease, "ready", make_result(duration_s=10.0 + now, versions={0: 2, 1: now}), now=now)
    ledger.cut([1], 1)
    (failed,) = lease_new(ledger, 1)
    ledger.settle(failed.lease, None, make_result(), now=9)
    assert ledger.durations(2) == [("failed", 1.0, 10), ("ready", 12.0, 4)]


# Rounds.


def test_exactly_the_unfinished_rounds_are_played_again():
    ledger = Ledger()
    run(ledger, "ready", "all_wrong", "all_right")
    ready, wrong, running = lease_new(ledger, 3)
    ledger.settle(ready.lease, "ready", make_result(), now=1)
    ledger.settle(wrong.lease, "all_wrong", make_result(), now=1)
    ledger.undo_open_rounds()
    assert ledger.verify() == GroupCounts(drawn=6, queued=3, ready=1, all_wrong=1, all_right=1)
    assert ledger.reported() == {"groups": 3}
    assert ledger.lease(0, 9, num_new=0) == [ready, wrong, running]


def test_round_that_ended_is_not_played_again():
    ledger = Ledger()
    run(ledger, "ready", "all_wrong")
    ledger.undo_open_rounds()
    assert ledger.verify() == GroupCounts(drawn=2, ready=1, all_wrong=1)


def test_batches_that_were_cut_are_not_undone_with_a_later_round():
    ledger = Ledger()
    train(ledger, 1)
    run(ledger, "ready")
    ledger.cut([2], 2)
    lease_new(ledger, 2)
    ledger.undo_open_rounds()
    assert ledger.verify() == GroupCounts(drawn=5, queued=2, in_batch=1, trained=2)


def test_undone_rounds_stay_undone_when_they_are_cut_off_again(path):
    ledger = Ledger(path)
    first = lease_new(ledger, 2)
    ledger.undo_open_rounds()
    ledger = closed(ledger, path)
    ledger.undo_open_rounds()
    assert ledger.lease(0, 2, num_new=0) == first


def test_group_undone_and_played_again_is_reported_once():
    ledger = Ledger()
    permits = lease_new(ledger, 2)
    ledger.settle(permits[0].lease, "ready", make_result(b"undone"), now=1)
    ledger.undo_open_rounds()
    for permit in ledger.lease(0, 2, num_new=0):
        ledger.settle(permit.lease, "ready", make_result(b"played again"), now=2)
    ledger.cut([0, 1], 1)
    assert ledger.batch(1) == [b"played again", b"played again"]
    assert ledger.reported(1) == {"groups": 2}


def test_facts_of_an_undone_group_are_reported_when_it_has_been_played_again():
    ledger = Ledger()
    cut, wrong, _ = lease_new(ledger, 3)
    ledger.settle(cut.lease, "ready", make_result(), now=1)
    ledger.settle(wrong.lease, "all_wrong", make_result(), now=1)
    ledger.cut([0], 1)
    ledger.undo_open_rounds()
    assert ledger.reported(1) == {"groups": 1}
    for permit in ledger.lease(0, 2, num_new=0):
        ledger.settle(permit.lease, "ready", make_result(), now=2)
    ledger.cut([1, 2], 2)
    assert (ledger.reported(1), ledger.reported(2)) == ({"groups": 1}, {"groups": 2})


# Moves that no group may make.


FORBIDDEN = {
    "settle a ready group": lambda ledger: ledger.settle((3, 1), "ready", make_result(), now=1),
    "settle an unknown group": lambda ledger: ledger.settle((99, 1), "ready", make_result(), now=1),
    "train a running group": lambda ledger: ledger.settle((7, 1), "trained", make_result(), now=1),
    "give a trained group back": lambda ledger: ledger.give_back((0, 1), "lost", max_attempts=3),
    "fail a queued group": lambda ledger: ledger.settle((8, 1), None, make_result(), now=1),
    "expire a batch's group": lambda ledger: ledger.expire(2, "too old"),
    "expire a queued group": lambda ledger: ledger.expire(8, "too old"),
    "cut a filtered group": lambda ledger: ledger.cut([4], 3),
    "cut a ready and a running group": lambda ledger: ledger.cut([3, 7], 3),
    "cut a group twice": lambda ledger: ledger.cut([3, 3], 3),
}


@pytest.mark.parametrize("move", FORBIDDEN.values(), ids=FORBIDDEN)
def test_forbidden_move_raises_and_changes_neither_file_nor_counts(path, move):
    ledger = make_ledger_with_groups_in_every_state(path)
    rows, counts = in_file(path), ledger.counts
    with pytest.raises(LedgerError, match="group"):
        move(ledger)
    assert in_file(path) == rows
    assert ledger.verify() == counts
    assert [permit.ordinal for permit in lease_new(ledger, 2)] == [8, 9]


def test_error_says_what_was_asked_for():
    ledger = Ledger()
    run(ledger, "ready")
    with pytest.raises(LedgerError, match=r"^group 0 is ready, not running$"):
        ledger.settle((0, 1), "ready", make_result(), now=1)
    with pytest.raises(LedgerError, match=r"^group 5 is unknown, not ready$"):
        ledger.expire(5, "too old")


def test_every_state_can_be_reached_and_live_ones_can_be_left():
    reached = {"queued"}.union(*MOVES.values())
    assert reached == set(MOVES)
    live = {"queued", "running", "ready", "in_batch"}
    assert all(MOVES[state] for state in live)


# The file.


@pytest.mark.parametrize("reopened", [closed, killed])
def test_everything_is_as_it_was_after_reopening(path, reopened):
    ledger = make_ledger_with_groups_in_every_state(path)
    expected = GroupCounts(
        drawn=9, queued=1, running=1, ready=1, in_batch=1, trained=2, all_wrong=1, failed=1, expired=1
    )
    assert ledger.verify() == expected
    leases, batch, ready = ledger.leases(), ledger.batch(2), ledger.ready()
    ledger = reopened(ledger, path)
    assert ledger.verify() == expected
    assert (ledger.leases(), ledger.batch(2), ledger.ready()) == (leases, batch, ready)
    assert [(worker, permit.ordinal) for worker, permit in leases] == [(1, 7)]
    assert batch == [b"2"]
    assert ledger.reasons() == {"worker lost": 1, "too old": 1}
    assert ledger.reported(1) == {"groups": 2}
    assert [(permit.ordinal, permit.task) for permit in lease_new(ledger, 2)] == [(8, 6), (9, 8)]


@pytest.mark.parametrize("reopened", [closed, killed])
def test_rewinding_and_forgetting_survive_reopening(path, reopened):
    ledger = Ledger(path)
    for step in (1, 2, 3):
        train(ledger, step, num=1)
    ledger.forget(1)
    ledger.rewind(2)
    ledger = reopened(ledger, path)
    assert ledger.verify() == GroupCounts(drawn=3, ready=1, trained=2)
    with pytest.raises(LedgerError, match=r"group 0\b.* is lost"):
        ledger.rewind(0)
    ledger.rewind(1)
    assert [ordinal for (ordinal, _), _ in ledger.ready()] == [1, 2]


@pytest.mark.parametrize("reopened", [closed, killed])
def test_rounds_are_numbered_on_after_reopening(path, reopened):
    ledger = Ledger(path)
    run(ledger, "ready", "ready")
    ledger = reopened(ledger, path)
    lease_new(ledger, 1)
    ledger.undo_open_rounds()
    assert ledger.verify() == GroupCounts(drawn=3, ready=2, queued=1)


def test_everything_acknowledged_is_there_after_kill_9(path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_WRITER, str(path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    acknowledged = [int(process.stdout.readline()) for _ in range(30)]
    process.kill()
    acknowledged += map(int, process.communicate()[0].split())
    ledger = Ledger(path)
    assert ledger.verify().balanced
    assert {ordinal for (ordinal, _), _ in ledger.ready()} >= set(acknowledged)
    assert ledger.counts.ready <= len(acknowledged) + 1


def test_moves_are_written_ahead_so_that_a_kill_between_two_pages_breaks_nothing(path):
    Ledger(path).close()
    assert sqlite3.connect(path).execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_ledger_in_memory_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(Ledger(), "ready")
    assert list(tmp_path.iterdir()) == []


def test_file_that_is_no_ledger_is_one_clear_error(path):
    path.write_bytes(b"trajectories, and no ledger at all. " * 100)
    with pytest.raises(LedgerError, match=r"ledger\.db is not a readable ledger: .*; move it away to begin anew"):
        Ledger(path)


def test_file_of_another_kind_is_one_clear_error(path):
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE groups (name TEXT)")
    other.close()
    with pytest.raises(LedgerError, match="is no ledger of this release"):
        Ledger(path)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data[:4096] + b"\xff" * 8192])
def test_damaged_file_is_one_clear_error(path, damage):
    ledger = Ledger(path)
    run(ledger, *["ready"] * 200)
    ledger.close()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(LedgerError, match="is not a readable ledger"):
        Ledger(path)


def test_counts_that_are_not_those_of_the_file_are_an_error(path):
    ledger = Ledger(path)
    run(ledger, "ready", "ready")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("UPDATE groups SET state = 'trained' WHERE ordinal = 0")
    other.close()
    with pytest.raises(LedgerError, match="does not add up"):
        ledger.verify()


def test_numbers_survive_reopening_to_the_last_bit(path):
    ledger = Ledger(path)
    (permit,) = lease_new(ledger, 1)
    ledger.settle(permit.lease, "ready", make_result(facts={"reward": 1 / 3}, versions={12: 7}), now=1)
    ledger = closed(ledger, path)
    assert ledger.reported() == {"reward": 1 / 3}
    assert ledger.ready()[0][1] == {12: 7}


# Faults that were there once.


def test_lease_that_was_given_back_cannot_end_the_groups_next_attempt():
    ledger = Ledger()
    (old,) = lease_new(ledger, 1)
    ledger.give_back(old.lease, "lost", max_attempts=3)
    ledger.lease(1, 1, num_new=0)
    with pytest.raises(LedgerError):
        ledger.settle(old.lease, "ready", make_result(), now=1)


def test_full_disk_is_one_clear_error_and_leaves_the_counts_as_they_were(path):
    ledger = Ledger(path)
    run(ledger, "ready")
    (pages,) = ledger._db.execute("PRAGMA page_count").fetchone()
    ledger._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    before = ledger.counts
    with pytest.raises(LedgerError, match="free space on its disk"):
        lease_new(ledger, 2000)
    assert ledger.verify() == before
    assert [permit.ordinal for permit in lease_new(ledger, 1)] == [1]


def test_ledger_that_another_process_writes_is_one_clear_error(path):
    ledger = Ledger(path)
    ledger._db.execute("PRAGMA busy_timeout = 10")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError):
        lease_new(ledger, 1)
    other.execute("ROLLBACK")
    assert ledger.verify() == GroupCounts()


def test_state_that_this_release_does_not_know_is_one_clear_error(path):
    ledger = Ledger(path)
    run(ledger, "ready")
    ledger.close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("UPDATE groups SET state = 'scoring'")
    other.close()
    with pytest.raises(LedgerError):
        Ledger(path).verify()


def test_moves_of_a_group_do_not_write_its_bytes_again(path):
    ledger = Ledger(path)
    (permit,) = lease_new(ledger, 1)
    ledger.settle(permit.lease, "ready", make_result(random.Random(0).randbytes(10_000_000)), now=1)
    moves = (
        lambda: ledger.cut([0], 1),
        lambda: ledger.mark_trained(1),
        lambda: ledger.rewind(0),
        lambda: ledger.cut([0], 1),
        lambda: ledger.mark_trained(1, refused="the loss is not finite"),
        lambda: ledger.forget(1),
    )
    before = num_bytes_in_wal(path)
    for move in moves:
        move()
    assert num_bytes_in_wal(path) - before < 1_000_000
    assert held(path) == []


def num_bytes_in_wal(path):
    """It does not begin anew meanwhile: it is shorter than what has it go into the main file."""
    return path.with_name(f"{path.name}-wal").stat().st_size


def test_ledger_whose_groups_have_other_columns_is_refused_and_left_as_it_is(path):
    make_ledger_with_groups_in_every_state(path).close()
    with closing(sqlite3.connect(path)) as other:
        other.execute("DROP INDEX outcomes")
        other.execute("ALTER TABLE groups RENAME COLUMN family TO kin")
    before = path.read_bytes()
    with pytest.raises(
        LedgerError, match=r"no ledger of this release: its groups have other columns \(family, kin\); b"
    ):
        Ledger(path)
    assert path.read_bytes() == before


def test_path_that_cannot_be_opened_is_one_clear_error(tmp_path):
    with pytest.raises(LedgerError, match="is not a readable ledger"):
        Ledger(tmp_path / "no such folder" / "ledger.db")


def test_groups_end_in_their_order_also_where_the_clock_is_set_back():
    ledger = Ledger()
    run(ledger, "ready", now=3600.0)
    run(ledger, "all_wrong", now=0.0)
    run(ledger, "all_wrong", now=1.0)
    assert ledger.num_without_signal() == 2
    run(ledger, "ready", now=2.0)
    assert ledger.num_without_signal() == 0
