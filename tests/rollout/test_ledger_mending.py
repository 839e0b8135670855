"""A ledger that lost its end beside a checkpoint that did not."""

import shutil
from dataclasses import replace

import pytest
from test_ledger import lease_new, run, train

from rollout.store.ledger import Ledger
from rollout.store.ledger_file import LedgerError
from rollout.store.lifecycle import NOTHING_TRAINED, GroupCounts, TrainedGroups, TrainedStep


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


def copy_of(path, folder, *, wal=True):
    """As a machine that went down at this moment would find it; without `wal`, as a careless copy."""
    folder.mkdir()
    shutil.copyfile(path, folder / path.name)
    if wal:
        shutil.copyfile(f"{path}-wal", folder / f"{path.name}-wal")
    return folder / path.name


def trained_states(ledger):
    return {ordinal: one.step for one in ledger.trained_groups().steps for ordinal, _ in one.groups}


def test_what_was_trained_is_told_step_by_step():
    ledger = Ledger()
    train(ledger, 1)
    run(ledger, "all_right", "ready")
    ledger.cut([3], 2)
    ledger.mark_trained(2, refused="the loss is not finite")
    run(ledger, "ready")
    ledger.cut([4], 3)
    assert ledger.trained_groups() == TrainedGroups(
        next_task=5,
        steps=(
            TrainedStep(step=1, groups=((0, 0), (1, 1))),
            TrainedStep(step=2, groups=((3, 3),), refused="the loss is not finite"),
            TrainedStep(step=3, groups=((4, 4),)),
        ),
    )


def test_synced_ledger_is_whole_without_its_wal_file(path, tmp_path):
    ledger = Ledger(path)
    train(ledger, 1)
    assert Ledger(copy_of(path, tmp_path / "before", wal=False)).counts.drawn == 0
    ledger.sync()
    train(ledger, 2)
    found = Ledger(copy_of(path, tmp_path / "after", wal=False))
    assert found.verify() == GroupCounts(drawn=2, trained=2)


def test_sync_does_not_wait_for_readers_and_holds_all_the_same(path, tmp_path):
    import sqlite3

    ledger = Ledger(path)
    train(ledger, 1)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT COUNT(*) FROM groups").fetchone()
    train(ledger, 2)
    ledger.sync()
    reader.close()
    assert Ledger(copy_of(path, tmp_path / "copy")).verify() == GroupCounts(drawn=4, trained=4)


def test_sound_ledger_is_left_as_it_is(path):
    ledger = Ledger(path)
    train(ledger, 1)
    ledger.sync()
    trained = ledger.trained_groups()
    run(ledger, "ready", "ready")
    ledger.cut([2], 2)
    before = list(map(tuple, ledger._db.execute("SELECT * FROM groups")))
    assert ledger.follow(trained, 1) == []
    assert list(map(tuple, ledger._db.execute("SELECT * FROM groups"))) == before


def test_ledger_that_lost_its_end_learns_from_the_checkpoint_what_is_trained(path, tmp_path):
    ledger = Ledger(path)
    train(ledger, 1)
    run(ledger, "ready", "ready")
    ledger.sync()
    lost = copy_of(path, tmp_path / "lost", wal=False)
    ledger.cut([2, 3], 2)
    ledger.mark_trained(2)
    run(ledger, "all_wrong")
    train(ledger, 3, num=2)
    trained = ledger.trained_groups()

    mended = Ledger(lost)
    first, tasks = mended.follow(trained, 3)
    assert first == (
        "the ledger had lost that the weights of the checkpoint after step 3 were trained on 4 groups (g000002, "
        "g000003, g000005, g000006); it stands there again"
    )
    assert tasks == "the ledger had lost 1 tasks that were drawn; they are drawn again"
    mended.rewind(3)
    assert trained_states(mended) == {0: 1, 1: 1, 2: 2, 3: 2, 5: 3, 6: 3}
    assert mended.verify() == GroupCounts(drawn=7, trained=6, queued=1)
    assert mended.follow(trained, 3) == []
    # The task that was filtered, then new ones; no number of a group is used again.
    assert [(one.ordinal, one.task) for one in lease_new(mended, 2)] == [(7, 4), (8, 7)]
    assert Ledger(lost).verify() == mended.counts


def test_task_that_was_trained_as_another_group_since_is_not_trained_again(path, tmp_path):
    """The group of the older file expired, and its task was drawn again, after that file was copied."""
    ledger = Ledger(path)
    run(ledger, "ready", "ready")
    ledger.sync()
    older = Ledger(copy_of(path, tmp_path / "older", wal=False))
    ledger.expire(0, "too old")
    run(ledger, "ready")
    ledger.cut([2], 1)
    ledger.mark_trained(1)
    assert older.follow(ledger.trained_groups(), 1)[-1] == (
        "the ledger had lost that the weights of the checkpoint after step 1 were trained on the tasks of 1 groups "
        "(g000000) as other groups"
    )
    older.rewind(1)
    older.cut([1], 2)
    older.mark_trained(2)
    assert older.trained_tasks() == [0, 1]
    assert older.verify() == GroupCounts(drawn=3, trained=2, expired=1)
    assert older.follow(older.trained_groups(), 2) == []


def test_empty_ledger_learns_all_of_it(path):
    ledger = Ledger()
    train(ledger, 1)
    ledger.mark_trained(1)
    run(ledger, "ready")
    ledger.cut([2], 2)
    ledger.mark_trained(2, refused="the loss is not finite")
    mended = Ledger(path)
    assert len(mended.follow(ledger.trained_groups(), 2)) == 1
    assert mended.verify() == GroupCounts(drawn=3, trained=2, refused=1)
    assert mended.trained_groups() == ledger.trained_groups()


def test_groups_that_other_weights_were_trained_on_are_open_again():
    ledger = Ledger()
    train(ledger, 1, num=1)
    run(ledger, "ready", "ready", "ready")
    ledger.cut([1], 2)
    ledger.mark_trained(2)
    older = ledger.trained_groups()
    # The same steps again, with other batches.
    ledger.rewind(1)
    ledger.cut([2, 3], 2)
    ledger.mark_trained(2)
    ledger.forget(2)
    assert len(ledger.follow(older, 2)) == 2
    assert trained_states(ledger) == {0: 1, 1: 2}
    # Their bytes were forgotten: they are run again.
    assert ledger.verify() == GroupCounts(drawn=4, trained=2, queued=2)


def test_batch_that_was_refused_is_so_again_where_the_ledger_lost_its_end(path):
    ledger = Ledger(path)
    run(ledger, "ready")
    ledger.cut([0], 1)
    ledger.follow(
        replace(NOTHING_TRAINED, next_task=1, steps=(TrainedStep(step=1, groups=((0, 0),), refused="NaN"),)), 1
    )
    ledger.rewind(1)
    assert ledger.verify() == GroupCounts(drawn=1, refused=1)


def test_ledger_of_another_run_is_refused():
    ledger = Ledger()
    train(ledger, 1)
    other = TrainedGroups(next_task=9, steps=(TrainedStep(step=1, groups=((0, 8),)),))
    with pytest.raises(
        LedgerError, match=r"not the ledger of the checkpoint after step 1: group g000000 has task 0, and"
    ):
        ledger.follow(other, 1)


def test_run_without_a_checkpoint_has_nothing_to_follow():
    ledger = Ledger()
    train(ledger, 1)
    assert ledger.follow(NOTHING_TRAINED, 0) == []


@pytest.mark.parametrize("seed", range(8))
def test_flipped_bit_in_the_wal_is_mended(path, tmp_path, seed):
    import random

    ledger = Ledger(path)
    for step in range(1, 4):
        train(ledger, step)
    trained = ledger.trained_groups()
    lost = copy_of(path, tmp_path / "lost")
    wal = lost.with_name(f"{lost.name}-wal")
    data = bytearray(wal.read_bytes())
    data[random.Random(seed).randrange(len(data))] ^= 1
    wal.write_bytes(data)
    mended = Ledger(lost)
    mended.follow(trained, 3)
    mended.rewind(3)
    assert mended.trained_groups() == trained
    assert mended.verify().trained == 6
