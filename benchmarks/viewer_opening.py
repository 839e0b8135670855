"""Measures how long the viewer takes to open a run in headless Chromium, and what the run's size adds to it.

    python -m benchmarks.viewer_opening runs/demo

The run's recorded trajectories are written again and again, under other names, until there are `--num` of them; a
second folder has the first hundred. Both are opened in turn, each time by a server of its own.
"""

import argparse
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from rollout.records import whole_lines

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FEW = 100
_PATIENCE_MS = 120_000


def chromium() -> str | None:
    """The path of this machine's browser, None where it has none."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def _grown(run: Path, folder: Path, num: int) -> Path:
    """A folder like the run's with so many trajectories, the run's own in turn."""
    folder.mkdir()
    for name in ("config.json", "provenance.json", "metrics.jsonl", "tokenizer.json", "summary.json"):
        if (run / name).exists():
            shutil.copy(run / name, folder)
    own = list(whole_lines(run / "trajectories.jsonl"))
    with (folder / "trajectories.jsonl").open("wb") as file:
        for number, line in enumerate(itertools.islice(itertools.cycle(own), num)):
            name = json.dumps(json.loads(line)["id"]).encode()
            file.write(line.replace(name, b'"t%07d"' % number, 1))
    return folder


@contextmanager
def viewer(folder: Path) -> Iterator[str]:
    """The address that the command says, as soon as it says it."""
    command = [sys.executable, "-m", "ray_jobs.cli", "view", str(folder), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = re.search(r"http://\S+", server.stdout.readline())
            if found is None:
                raise SystemExit(f"the viewer of {folder} gave no address")
            yield found[0]
        finally:
            server.terminate()


def _opened(browser: "Browser", folder: Path, num: int) -> tuple[float, float, float]:
    """Seconds until the command says its address; from there until rows stand on the page; until all are counted."""
    started = time.perf_counter()
    with viewer(folder) as address:
        said = time.perf_counter()
        page = browser.new_page()
        page.set_default_timeout(_PATIENCE_MS)
        page.goto(f"{address}#/trajectories")
        page.wait_for_selector(".item .row")
        shown = time.perf_counter()
        page.get_by_text(f"{num:,} found").wait_for()
        counted = time.perf_counter()
        page.close()
    return said - started, shown - said, counted - said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--num", type=int, default=20_000, help="trajectories in the large run")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    executable = chromium()
    if executable is None:
        raise SystemExit(f"needs a browser, one of {', '.join(_BROWSERS)}")
    from playwright.sync_api import sync_playwright

    table = Table("trajectories", "MB", "command", "to rows", "to all counted", title="Opening a run, median seconds")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--headless", "--no-sandbox"])
        runs = {num: _grown(asked.run, Path(folder) / str(num), num) for num in (_FEW, asked.num)}
        seconds = {num: [_opened(browser, run, num) for _ in range(asked.repeats)] for num, run in runs.items()}
        for num, run in runs.items():
            size = (run / "trajectories.jsonl").stat().st_size / 1e6
            table.add_row(f"{num:,}", f"{size:.0f}", *(f"{median(one):.2f}" for one in zip(*seconds[num], strict=True)))
        browser.close()
    Console().print(table)


if __name__ == "__main__":
    main()
