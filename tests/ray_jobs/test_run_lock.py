import subprocess
import sys

import pytest

from configs.errors import UserError
from ray_jobs.run.folder import lock


def test_folder_is_locked_until_closed(tmp_path):
    held = lock(tmp_path)
    with pytest.raises(UserError, match="process"):
        lock(tmp_path)
    held.close()
    lock(tmp_path).close()


def test_the_lock_ends_with_its_process(tmp_path):
    script = f"from pathlib import Path; from ray_jobs.run.folder import lock; held = lock(Path({str(tmp_path)!r}));"
    subprocess.run([sys.executable, "-c", f"{script} import os; os._exit(1)"], check=False)
    lock(tmp_path).close()
