import subprocess
import sys

import pytest

from configs.loading import load_run_config
from ray_jobs.run import folder as run_folder
from ray_jobs.run.folder import RunFolder, RunLockError, lock


def make_folder(tmp_path, **rest):
    return RunFolder.create(load_run_config(None, [f"output_dir={tmp_path}", "name=r"]), **rest)


def test_a_run_folder_is_locked_until_it_is_closed(tmp_path):
    held = lock(tmp_path)
    with pytest.raises(RunLockError, match="process"):
        lock(tmp_path)
    held.close()
    lock(tmp_path).close()


def test_the_lock_ends_with_its_process(tmp_path):
    script = f"from pathlib import Path; from ray_jobs.run.folder import lock; held = lock(Path({str(tmp_path)!r}));"
    subprocess.run([sys.executable, "-c", f"{script} import os; os._exit(1)"], check=False)
    lock(tmp_path).close()


def test_the_folder_stays_locked_while_it_goes_back_to_a_step(tmp_path, monkeypatch):
    refused, rewrite = [], run_folder._rewrite

    def second_process(*written):
        rewrite(*written)
        with pytest.raises(RunLockError):
            lock(tmp_path / "r")
        refused.append(True)

    monkeypatch.setattr(run_folder, "_rewrite", second_process)
    with make_folder(tmp_path) as folder:
        folder.rewind(0)
    assert refused
