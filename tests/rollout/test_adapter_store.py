import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from rollout.store.adapters import AdapterMismatchError, AdapterStore, AdapterStoreError, PublishedAdapter


def bytes_of(version):
    return f"weights of {version}".encode()


def make_published(version, *, data=None):
    digest = hashlib.sha256(bytes_of(version) if data is None else data).hexdigest()
    return PublishedAdapter(policy_version=version, digest=digest)


def make_store(folder, *, versions=()):
    store = AdapterStore(folder)
    for version in versions:
        store.publish(make_published(version), bytes_of(version))
    return store


def versions_with_bytes(folder):
    return sorted(int(path.name[1:7]) for path in folder.glob("v*.safetensors"))


def index_of(folder):
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


def test_empty_store_begins_at_version_zero(tmp_path):
    store = make_store(tmp_path / "adapters")
    assert (store.newest, store.next_version, store.num_published) == (None, 0, 0)


def test_published_version_is_found_and_its_bytes_come_back(tmp_path):
    store = make_store(tmp_path, versions=[0, 1])
    assert store.newest == store.find(1) == make_published(1)
    assert store.read(store.newest) == bytes_of(1)
    assert (store.next_version, store.num_published) == (2, 2)


def test_number_that_was_used_is_refused(tmp_path):
    store = make_store(tmp_path, versions=[0, 1, 2])
    other = make_published(2, data=b"other")
    with pytest.raises(ValueError, match="version 2 was published before; the next is 3"):
        store.publish(other, b"other")
    with pytest.raises(ValueError, match="version 1 was published before; the next is 3"):
        store.publish(make_published(1), bytes_of(1))
    assert store.read(make_published(2)) == bytes_of(2)
    assert store.num_published == len(index_of(tmp_path)) == 3


def test_same_publication_twice_changes_nothing(tmp_path):
    store = make_store(tmp_path, versions=[0, 1])
    store.publish(make_published(1), bytes_of(1))
    AdapterStore(tmp_path).publish(make_published(1), bytes_of(1))
    assert store.num_published == len(index_of(tmp_path)) == 2


def test_bytes_that_are_not_what_the_digest_says_are_refused(tmp_path):
    store = make_store(tmp_path, versions=[0])
    with pytest.raises(ValueError, match="version 1: sha256"):
        store.publish(make_published(1), b"torn on the way")
    assert (store.next_version, versions_with_bytes(tmp_path)) == (1, [0])


def test_numbers_may_be_left_out(tmp_path):
    store = make_store(tmp_path, versions=[0, 7])
    assert (store.next_version, store.find(3)) == (8, None)


def test_version_numbers_continue_after_reopening(tmp_path):
    make_store(tmp_path, versions=[0, 1, 2])
    store = AdapterStore(tmp_path)
    assert (store.next_version, store.num_published) == (3, 3)
    assert store.newest == make_published(2)
    assert [store.find(version) for version in range(3)] == [make_published(version) for version in range(3)]
    with pytest.raises(ValueError, match="published before"):
        store.publish(make_published(2, data=b"other"), b"other")


def test_line_that_a_crash_cut_off_was_never_published(tmp_path):
    make_store(tmp_path, versions=[0])
    with (tmp_path / "index.jsonl").open("a") as index:
        index.write(json.dumps({"policy_version": 1, "digest": "ab"})[:-9])
    store = AdapterStore(tmp_path)
    assert (store.newest, store.next_version) == (make_published(0), 1)
    store.publish(make_published(1), bytes_of(1))
    assert AdapterStore(tmp_path).newest == make_published(1)


def test_crash_before_the_line_leaves_the_number_free(tmp_path, monkeypatch):
    store = make_store(tmp_path, versions=[0])

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("rollout.store.adapters.append_record", killed)
        with pytest.raises(KeyboardInterrupt):
            store.publish(make_published(1), bytes_of(1))
    store = AdapterStore(tmp_path)
    assert store.next_version == 1
    retrained = make_published(1, data=b"trained again, a little different")
    store.publish(retrained, b"trained again, a little different")
    assert store.read(retrained) == b"trained again, a little different"


def test_version_that_could_not_be_written_is_one_clear_error_and_not_published(tmp_path):
    store = make_store(tmp_path / "adapters", versions=[0])
    shutil.rmtree(tmp_path / "adapters")
    with pytest.raises(AdapterStoreError, match=r"cannot write version 1 to '.*adapters'"):
        store.publish(make_published(1), bytes_of(1))
    assert (store.newest, store.next_version) == (make_published(0), 1)


def test_bytes_that_changed_on_disk_are_caught(tmp_path):
    store = make_store(tmp_path, versions=[0])
    (file,) = tmp_path.glob("v000000-*.safetensors")
    file.write_bytes(b"weights of somebody else")
    with pytest.raises(AdapterMismatchError, match="published was"):
        store.read(store.newest)


def test_bytes_that_are_gone_are_caught_as_those_that_changed(tmp_path):
    store = make_store(tmp_path, versions=[0])
    (file,) = tmp_path.glob("v000000-*.safetensors")
    file.unlink()
    with pytest.raises(AdapterMismatchError, match=r"v000000-.* was published and is not there: there is no v000000-"):
        store.read(store.newest)


def test_bytes_without_a_line_are_swept(tmp_path):
    make_store(tmp_path, versions=[0, 1])
    (tmp_path / "v000002-abcdef01.safetensors").write_bytes(b"its writer died before the line")
    AdapterStore(tmp_path)
    assert versions_with_bytes(tmp_path) == [0, 1]


def test_line_is_written_and_synced_after_the_bytes(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd))
    )
    make_store(tmp_path / "adapters", versions=[0])
    assert synced[0].endswith(".partial")
    assert synced[1:] == ["index.jsonl", "adapters"]


def test_only_the_newest_bytes_are_kept_but_every_digest_is_remembered(tmp_path):
    store = make_store(tmp_path, versions=[0, 1, 2, 3])
    assert versions_with_bytes(tmp_path) == [2, 3]
    for known in (store, AdapterStore(tmp_path)):
        assert [known.find(version) for version in range(4)] == [make_published(version) for version in range(4)]
    assert [row["digest"] for row in index_of(tmp_path)] == [make_published(version).digest for version in range(4)]
    assert store.read(store.find(2)) == bytes_of(2)


def test_nothing_half_written_is_left_behind(tmp_path):
    make_store(tmp_path, versions=[0])
    assert len(list(tmp_path.iterdir())) == 2
