import pytest

from ray_jobs.run.folder import RunLockError, lock


def test_folder_is_locked_until_closed(tmp_path):
    held = lock(tmp_path)
    with pytest.raises(RunLockError, match="process"):
        lock(tmp_path)
    held.close()
    lock(tmp_path).close()
