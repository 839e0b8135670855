import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout import files
from rollout.files import network_file_system, whole_folder, write_whole


def fill(target, text):
    with whole_folder(target) as partial:
        (partial / "file").write_text(text)


def refuse(*paths):
    raise OSError


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_that_is_replaced_is_there_at_every_moment_or_comes_back(tmp_path, monkeypatch, exchange):
    """Where the file system cannot exchange two folders, the old one is kept aside between two renames."""
    target = tmp_path / "prm"
    fill(target, "old")
    if not exchange:
        monkeypatch.setattr(files.kernel, "exchange", refuse)
    rename, remove, states = Path.rename, files.remove_tree, []

    def see():
        found = [path for path in (target, target.with_name(".prm.replaced")) if (path / "file").exists()]
        states.append({(path / "file").read_text() for path in found})

    monkeypatch.setattr(Path, "rename", lambda *given: (see(), rename(*given), see())[1])
    monkeypatch.setattr(files, "remove_tree", lambda path: (see(), remove(path), see())[1])
    fill(target, "new")
    assert all(states)
    assert (target / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["prm"]


def test_a_writer_sweeps_the_halves_of_its_own_folder_only(tmp_path):
    """`[` is a letter of a pattern, and `out` is the beginning of another folder's name."""
    for name in ("out[1]", "out", "out.v2"):
        (tmp_path / f".{name}.{os.getpid() + 1}.partial").mkdir()
    fill(tmp_path / "out[1]", "a")
    fill(tmp_path / "out", "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".out.v2.{os.getpid() + 1}.partial", "out", "out[1]"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError()])
def test_lines_that_cannot_be_written_leave_the_old_file_alone(tmp_path, error):
    def lines():
        yield b"new\n"
        raise error

    path = tmp_path / "rows.jsonl"
    write_whole(path, [b"old\n", b"older\n"])
    with pytest.raises(type(error)):
        write_whole(path, lines())
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("rows.jsonl", "old\nolder\n")]


def test_a_folder_is_on_the_file_system_of_the_nearest_mount(monkeypatch):
    kinds = {"/": "ext4", "/home": "nfs4", "/home/me/runs": "xfs", "/mnt": "fuse.sshfs", "/opt": "fuse.squashfuse"}
    mounts = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in kinds.items()]
    monkeypatch.setattr(files.psutil, "disk_partitions", lambda all: mounts)
    places = ("/var/runs", "/home/me", "/home/me/runs/r", "/mnt/runs", "/opt/runs")
    assert [network_file_system(Path(place)) for place in places] == [None, "nfs4", None, "fuse.sshfs", None]
