"""The power of a run is cut at random points; the model of the disk is in tests/ray_jobs/durable_disk.py."""

import hashlib
import io
import itertools
import json
import os
import random
import re
import shutil
import sqlite3

import pytest

from learner.checkpoint import CheckpointError
from rollout.records import read_records
from rollout.store import disk
from rollout.store.ledger import Ledger
from rollout.store.ledger_file import LedgerFile
from tests.ray_jobs import power_cut
from tests.ray_jobs.durable_disk import DurableDisk, PowerCutError
from tests.ray_jobs.power_cut import TrainedTwiceError, cut_again_and_again, go_on, make_config

MENDED = re.compile(r"the ledger (had lost|said that)|metrics\.jsonl has lost")


def steps_of(folder):
    return [row["step"] for row in read_records(folder / "r" / "metrics.jsonl") if "policy/loss" in row]


@pytest.mark.parametrize("seed", [1, 2])
def test_no_group_is_trained_twice_whenever_the_power_is_cut(tmp_path, seed):
    said = cut_again_and_again(tmp_path, 20, seed, "num_steps=80")
    lives = sorted(tmp_path.glob("life-*"), key=lambda path: int(path.name[5:]))
    assert len(lives) == 21, "the run ended before its last cut"
    assert steps_of(lives[-1]) == list(range(1, 81))
    assert not MENDED.search(said)


def test_run_with_one_checkpoint_always_has_it(tmp_path):
    cut_again_and_again(tmp_path, 12, 3, "num_steps=60", "learner.keep_checkpoints=1", "learner.checkpoint_every=1")


def test_disk_that_only_says_that_it_synced_is_found_out_and_the_ledger_mended(tmp_path, monkeypatch):
    """The ledger's syncs reach nothing; each time weights know more than the ledger the run says so."""
    monkeypatch.setattr(LedgerFile, "sync", lambda self: None)
    monkeypatch.setattr(LedgerFile, "checkpoint", lambda self: None)
    monkeypatch.setattr(DurableDisk, "_ledger_synced", lambda *_: None)
    assert "the ledger had lost that the weights" in cut_again_and_again(tmp_path, 20, 4, "num_steps=80")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of 6 steps of 10, whose process ended without a chance to tidy up: its folder as on a sound disk."""
    home = tmp_path_factory.mktemp("undisturbed")
    (home / "run").mkdir()
    seen = itertools.count()

    def stop_at_step_7(*_):
        if next(seen) == 6:
            shutil.copytree(home / "run", home / "found")
            raise PowerCutError
        return True

    with pytest.MonkeyPatch.context() as patch:
        real = power_cut.train_step
        patch.setattr(power_cut, "train_step", lambda *given: stop_at_step_7() and real(*given))
        with pytest.raises(PowerCutError):
            go_on(make_config(home / "run", "num_steps=10"), io.StringIO())
    return home / "found"


@pytest.fixture
def found(undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "found")
    return tmp_path / "found"


def resume(folder):
    """What the run says as it goes on to its end; `go_on` raises where a group is trained twice."""
    said = io.StringIO()
    go_on(make_config(folder, "num_steps=10"), said)
    assert steps_of(folder)[-1] == 10
    return said.getvalue()


def test_run_whose_folder_is_whole_has_nothing_to_mend(found):
    assert not MENDED.search(resume(found))


def test_ledger_that_was_copied_without_its_wal_file_still_knows_what_the_checkpoint_knows(found):
    (found / "r" / "ledger.sqlite-wal").unlink()
    assert not MENDED.search(resume(found))


def test_older_copy_of_the_ledger_is_mended_and_told(found):
    ledger = found / "r" / "ledger.sqlite"
    for end in ("", "-wal", "-shm"):
        ledger.with_name(ledger.name + end).unlink(missing_ok=True)
    said = resume(found)
    assert (
        "the ledger had lost that the weights of the checkpoint after step 6 were trained on 12 groups (g0000" in said
    )


def test_flipped_bits_in_the_wal_file_lose_nothing_that_was_trained(found, tmp_path):
    rng = random.Random(5)
    for turn in range(3):
        folder = tmp_path / f"turn-{turn}"
        shutil.copytree(found, folder)
        wal = folder / "r" / "ledger.sqlite-wal"
        data = bytearray(wal.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        wal.write_bytes(data)
        resume(folder)


def test_step_whose_row_is_lost_is_not_made_again(found):
    metrics = found / "r" / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))
    assert "metrics.jsonl has lost 1 of the 6 train steps that the checkpoint knows (first: step 6)" in resume(found)
    assert steps_of(found) == [1, 2, 3, 4, 5, 7, 8, 9, 10]


def test_checkpoints_that_are_all_gone_are_one_clear_error_and_the_logs_stay(found):
    shutil.rmtree(found / "r" / "checkpoints")
    with pytest.raises(Exception, match=r"is lost: .* put a newer one back into the run's checkpoints/, or begin anew"):
        resume(found)
    assert steps_of(found) == [1, 2, 3, 4, 5, 6]


def test_corrupt_newest_checkpoint_takes_no_place_among_those_kept(found):
    newest, older = sorted((found / "r" / "checkpoints").glob("v*"), reverse=True)
    (newest / "optimizer.pt").write_bytes(b"rubbish")
    said = resume(found)
    assert f"passed over a checkpoint: {newest}/optimizer.pt: sha256" in said
    assert not MENDED.search(said)
    kept = sorted(path.name for path in newest.parent.iterdir())
    assert kept[0] == f"unusable-{newest.name}"
    assert len(kept) == 3
    assert older.name not in kept


def test_steps_that_were_done_and_that_no_checkpoint_knows_any_more_are_made_again(found):
    """Regression: weights of an older step were evaluated, and the summary called them those of the last one."""
    resume(found)
    run = found / "r"
    phases = json.loads((run / "phases.json").read_text())
    phases |= {name: {"seconds": 5.0, "facts": {"num_steps": 10}} for name in ("reinforce", "eval_after")}
    (run / "phases.json").write_text(json.dumps(phases))
    newest = max((run / "checkpoints").glob("v*"))
    (newest / "adapter.safetensors").write_bytes(b"rubbish")
    said = resume(found)
    assert "no checkpoint is left that knows the train steps after 8: they are made again" in said
    assert steps_of(found) == list(range(1, 11))
    phases = json.loads((run / "phases.json").read_text())
    assert "eval_after" not in phases
    assert phases["reinforce"]["before_s"] == 5.0


def test_steps_that_were_done_and_stand_in_a_checkpoint_are_not_made_again(found):
    resume(found)
    run = found / "r"
    phases = json.loads((run / "phases.json").read_text()) | {"reinforce": {"seconds": 5.0, "facts": {"num_steps": 10}}}
    (run / "phases.json").write_text(json.dumps(phases))
    assert "made again" not in resume(found)
    assert json.loads((run / "phases.json").read_text()) == phases


@pytest.mark.parametrize("gone", [True, False])
def test_cold_started_policy_that_is_gone_is_one_clear_error(found, gone):
    (checkpoint,) = (found / "r" / "cold_start").iterdir()
    if gone:
        shutil.rmtree(checkpoint)
    else:
        (checkpoint / "optimizer.pt").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"the policy that RL begins with is gone: .*; put the folder back, or"):
        resume(found)


def test_group_whose_bytes_a_disk_changed_fails_once_and_the_run_goes_on(found):
    with sqlite3.connect(found / "r" / "ledger.sqlite") as ledger:
        (ordinal, payload) = ledger.execute(
            "SELECT ordinal, data FROM groups JOIN payloads USING (ordinal) WHERE state = 'ready'"
        ).fetchone()
        broken = bytearray(payload)
        broken[len(broken) // 2] ^= 1
        ledger.execute("UPDATE payloads SET data = ? WHERE ordinal = ?", (bytes(broken), ordinal))
    ledger.close()
    said = resume(found)
    assert f"the disk has changed the bytes of 1 groups (g{ordinal:06d}); they failed and are not trained" in said
    assert Ledger(found / "r" / "ledger.sqlite").reasons() == {"its bytes changed on disk": 1}


def test_group_to_look_at_whose_bytes_a_disk_changed_is_not_shown_and_the_run_goes_on(found):
    """Regression: the step's records could not be written, at this resume and at every other."""
    with sqlite3.connect(found / "r" / "ledger.sqlite") as ledger:
        (ordinal,) = ledger.execute("SELECT ordinal FROM groups WHERE state = 'ready'").fetchone()
        ledger.execute(
            "UPDATE groups SET state = 'all_wrong', shown = 1, reported_step = NULL WHERE ordinal = ?", (ordinal,)
        )
        ledger.execute("UPDATE payloads SET data = X'00' WHERE ordinal = ?", (ordinal,))
    ledger.close()
    said = resume(found)
    assert f"the disk has changed the bytes of 1 groups (g{ordinal:06d}), kept to be looked at; they are not" in said


def test_weights_that_were_trained_twice_would_be_noticed(found):
    """The check itself: checkpoints whose lists leave out half of what their weights were trained on."""
    for checkpoint in (found / "r" / "checkpoints").glob("v*"):
        listed, manifest = checkpoint / "trained.json", checkpoint / "manifest.json"
        said, facts = json.loads(listed.read_text()), json.loads(manifest.read_text())
        for one in said["steps"]:
            one["groups"] = [[ordinal, task] for ordinal, task in one["groups"] if ordinal % 2]
        listed.write_text(json.dumps(said))
        facts["files"]["trained.json"] = hashlib.sha256(listed.read_bytes()).hexdigest()
        manifest.write_text(json.dumps(facts))
    with pytest.raises(TrainedTwiceError):
        resume(found)


def test_folder_is_synced_before_it_gets_its_name_and_before_anything_is_deleted(tmp_path, monkeypatch):
    seen = []
    fsync, rename = os.fsync, disk.Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(disk.Path, "rename", lambda old, new: (seen.append(f"rename {new}"), rename(old, new))[1])
    target = tmp_path / "all" / "one"
    with disk.whole_folder(target) as partial:
        (partial / "a").write_text("a")
        (partial / "b").write_text("b")
    half = str(disk.partial_of(target))
    assert seen == [f"{half}/a", f"{half}/b", half, f"rename {target}", str(target.parent), str(tmp_path)]
