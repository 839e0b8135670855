"""A disk that takes no more: one clear error each time, nothing lost, nothing half written."""

import hashlib
import resource
from contextlib import contextmanager

import pytest

from configs.loading import load_run_config
from learner.checkpoint import CheckpointError, newest_checkpoint, save_checkpoint
from ray_jobs.cli import _for_the_user
from ray_jobs.run.folder import RunFolder, RunFolderError
from ray_jobs.viewer.report import write_report
from rollout.records import TOKENIZER, append_record, read_records
from rollout.store.adapters import AdapterStore, AdapterStoreError, PublishedAdapter
from rollout.store.disk import sweep_partials, write_whole
from tests.simulated_parts import SimulatedLearner


@contextmanager
def full_at(num_bytes):
    """No file gets longer than so many bytes: what is written behind that is refused, as by a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("room", [0, 1000, 17_000])
def test_checkpoint_is_one_clear_error_and_the_one_before_stays(tmp_path, room):
    """No room for the adapter, for the list, or for the optimizer, of which torch says nothing clear."""
    learner = SimulatedLearner(padding=0)
    learner.optimizer = learner._torch.optim.Adam([learner._weights])
    learner._weights.grad = learner._weights.detach() * 0
    learner.optimizer.step()
    save_checkpoint(learner, tmp_path, keep=1)
    before = files_in(tmp_path)
    learner.policy_version = 1
    with full_at(room), pytest.raises(CheckpointError, match=r"cannot write checkpoint .*v000001: .*; free space or"):
        save_checkpoint(learner, tmp_path, keep=1)
    assert files_in(tmp_path) == before
    checkpoint, faults = newest_checkpoint(tmp_path)
    assert (checkpoint.folder.name, faults) == ("v000000", [])
    save_checkpoint(learner, tmp_path, keep=1)
    assert newest_checkpoint(tmp_path)[0].folder.name == "v000001"


def test_adapter_is_one_clear_error_and_can_be_published_once_there_is_room(tmp_path):
    store, data = AdapterStore(tmp_path), bytes(5000)
    published = PublishedAdapter(policy_version=0, digest=hashlib.sha256(data).hexdigest())
    with full_at(1000), pytest.raises(AdapterStoreError, match=r"cannot write version 0 .* free some space there and"):
        store.publish(published, data)
    assert files_in(tmp_path) == []
    store.publish(published, data)
    assert AdapterStore(tmp_path).read(published) == data


def test_line_that_did_not_fit_names_its_file_and_leaves_the_others_whole(tmp_path):
    path = tmp_path / "acknowledged.jsonl"
    append_record(path, {"worker": 0})
    with full_at(40), pytest.raises(OSError, match="File too large") as caught:
        append_record(path, {"worker": 1, "padding": "x" * 100})
    said = _for_the_user(caught.value)
    assert said == f"cannot use '{path}': File too large; see to its rights and free space, or name another place"
    append_record(path, {"worker": 2})
    assert [row["worker"] for row in read_records(path)] == [0, 2]


def test_logs_are_one_clear_error(tmp_path):
    with RunFolder.create(load_run_config(None, [f"output_dir={tmp_path}", "name=r"])) as folder:
        folder.log_metrics(1, {"policy/loss": 0.5})
        room = (folder.path / "metrics.jsonl").stat().st_size
        with full_at(room), pytest.raises(RunFolderError, match=r"cannot write '.*metrics.jsonl': .*; free some space"):
            folder.log_metrics(2, {"policy/loss": 0.5})


def test_report_leaves_the_one_before(tmp_path):
    folder = RunFolder.create(load_run_config(None, [f"output_dir={tmp_path}", "name=r"]))
    folder.close()
    report = write_report(folder.path)
    before = report.read_bytes()
    with full_at(1000), pytest.raises(OSError, match="File too large") as caught:
        write_report(folder.path)
    assert caught.value.filename == str(report)
    assert report.read_bytes() == before
    assert not list(folder.path.glob("*.partial"))


def test_copy_of_the_tokenizer_is_whole_or_not_there(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / TOKENIZER).write_bytes(bytes(5000))
    with RunFolder.create(load_run_config(None, [f"output_dir={tmp_path}", "name=r"])) as folder:
        with full_at(1000), pytest.raises(RunFolderError, match=rf"cannot write '.*{TOKENIZER}': .*; free some space"):
            folder.keep_tokenizer(tmp_path / "model")
        assert not list(folder.path.glob("tokenizer*"))
        folder.keep_tokenizer(tmp_path / "model")
        assert (folder.path / TOKENIZER).stat().st_size == 5000


def test_halves_of_writers_that_died_are_swept(tmp_path):
    half = tmp_path / ".v000001.77.partial"
    half.mkdir()
    (half / "optimizer.pt").touch()
    (tmp_path / ".abc.77.partial").touch()
    (tmp_path / "v000000").mkdir()
    sweep_partials(tmp_path)
    assert files_in(tmp_path) == ["v000000"]


def test_writers_sweep_where_they_write(tmp_path):
    adapters, checkpoints = tmp_path / "adapters", tmp_path / "checkpoints"
    for folder in (adapters, checkpoints):
        folder.mkdir()
        (folder / ".v000009.77.partial").mkdir()
    AdapterStore(adapters)
    save_checkpoint(SimulatedLearner(), checkpoints, keep=1)
    assert files_in(adapters) == []
    assert not list(checkpoints.glob(".*"))


def test_file_that_does_not_fit_leaves_the_one_before(tmp_path):
    write_whole(tmp_path / "phases.json", b"before")
    with full_at(10), pytest.raises(OSError, match="File too large"):
        write_whole(tmp_path / "phases.json", bytes(100))
    assert files_in(tmp_path) == ["phases.json"]
    assert (tmp_path / "phases.json").read_bytes() == b"before"
