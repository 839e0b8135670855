import os
import subprocess
import sys

import pytest

from rollout import files as disk
from rollout.files import MemoryFolder

DIES = """
import os, sys
from pathlib import Path
from rollout import files as disk
disk.MEMORY = Path(sys.argv[1])
folder = disk.MemoryFolder()
(folder.path / "v1").mkdir()
(folder.path / "v1" / "adapter.safetensors").write_bytes(bytes(100))
os._exit(1)
"""


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "MEMORY", tmp_path)
    return tmp_path


def nest(folder, depth):
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        above, here = here, os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(above)
    os.close(here)


def die(memory):
    subprocess.run([sys.executable, "-c", DIES, str(memory)], check=False)


def test_what_a_dead_process_left_goes_when_the_next_one_begins(memory):
    die(memory)
    die(memory)
    [left] = memory.iterdir()
    nest(left, 2500)
    folder = MemoryFolder()
    assert list(memory.iterdir()) == [folder.path.parent]
    folder.close()
    assert not list(memory.iterdir())


def test_folder_of_a_process_that_lives_stays_whatever_its_number(memory):
    first = MemoryFolder()
    # As another container would see it, in which there is no such process.
    elsewhere = first.path.parent.rename(memory / "agentflow-999999999-x")
    second = MemoryFolder()
    assert elsewhere.exists()
    second.close()


def test_folder_that_is_being_made_is_not_taken_for_one_that_was_left(memory, monkeypatch):
    """Regression: all workers of a host make theirs at the same moment, and one of them swept another's."""
    lock = disk.fcntl.flock
    monkeypatch.setattr(disk.fcntl, "flock", lambda *how: (monkeypatch.undo(), disk.sweep(memory), lock(*how)))
    folder = MemoryFolder()
    assert list(memory.iterdir()) == [folder.path.parent]
    folder.close()
