"""The slow commands of the documentation, executed as a reader would: one after the other, in one folder."""

import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request

import nbformat
import pytest
from nbclient import NotebookClient

from tests.documented import ROOT, blocks, environment, fill

pytestmark = [pytest.mark.faults, pytest.mark.ray, pytest.mark.slow]

LIMIT_S = 1800
FIRST = "first-run.md"
"""Whose `make train` leaves the run that the other pages speak of."""

# Its page's order within a page, and the first run before all others.
SLOW = sorted(
    (block for block in blocks() if block.marks.get("runs") in ("slow", "server") and "by" not in block.marks),
    key=lambda block: block.page.name != FIRST,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reader")


@pytest.fixture(scope="module")
def done():
    """Scripts that ran already: the README shows some of the pages' commands."""
    return set()


@pytest.mark.parametrize("block", SLOW, ids=lambda block: block.name)
def test_slow_command_does_what_the_page_says(block, folder, done):
    fill(folder, block.page)
    if block.marks["runs"] == "server":
        assert_serves(block.script, folder)
        return
    script = "\n".join(line for line in block.script.splitlines() if line not in done)
    process = start(script, folder)
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    finally:
        end(process)
    assert process.returncode == 0, f"{script}\n{said[-4000:]}"
    assert block.marks.get("prints", "") in said, f"{script}\n{said[-4000:]}"
    done.update(block.script.splitlines())


def test_notebook_trains_and_shows_why_a_step_got_its_advantage(folder, monkeypatch):
    """The run is there already where the first run's page was executed before."""
    notebook = nbformat.read(ROOT / "docs/first-run.ipynb", as_version=4)
    (settings,) = (one.marks["with"] for one in blocks() if one.page.name == FIRST and "make train" in one.text)
    fill(folder, ROOT / "docs" / FIRST)
    for name, value in (environment() | dict([settings.replace("'", "").split("=", 1)])).items():
        monkeypatch.setenv(name, value)
    NotebookClient(notebook, timeout=LIMIT_S, resources={"metadata": {"path": str(folder)}}).execute()
    _, _, table, _, advantages, answer = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert "| tasks | number | before | after |" in table.outputs[0]["data"]["text/markdown"]
    assert "reward 1.0" in printed(advantages)
    assert "answer" in printed(answer)


def printed(cell):
    return "".join(output["text"] for output in cell.outputs if output["output_type"] == "stream")


def assert_serves(script, folder):
    """It prints an address on loopback, and something answers there."""
    process = start(script, folder)
    said = ""
    try:
        address = None
        while address is None:
            line = process.stdout.readline()
            assert line, f"{script} ended without an address:\n{said[-4000:]}"
            said += line
            address = re.search(r"http://(127\.0\.0\.1|localhost):\d+[^\s\x1b]*", said)
        for attempt in range(60):
            try:
                urllib.request.urlopen(address[0], timeout=10).close()
                return
            except urllib.error.HTTPError:
                return  # an answer, of a server that wants another kind of request
            except OSError:
                assert attempt < 59, f"nobody answers at {address[0]}"
                time.sleep(1)
    finally:
        end(process)


def start(script, folder):
    return subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def end(process):
    """The whole group: what a script left running must not outlive the test."""
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:
            return
        for _ in range(50):
            if process.poll() is not None:
                break
            time.sleep(0.1)
    process.wait()
