"""The browser of this machine, and a viewer to open in it."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """Return the path of an installed browser, or None."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


@contextmanager
def viewer(folder: Path) -> Iterator[str]:
    """Serve the run and yield the printed address."""
    command = [sys.executable, "-m", "ray_jobs.cli", "view", str(folder), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = re.search(r"http://\S+", server.stdout.readline())
            if found is None:
                raise SystemExit(f"the viewer of {folder} printed no address")
            yield found[0]
        finally:
            server.terminate()
