"""The slow commands of the documentation, executed one after the other in one folder."""

import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from contextlib import suppress

import nbformat
import pytest
from nbclient import NotebookClient

from tests.documented import ROOT, SHOWN, environment, fill

pytestmark = [pytest.mark.faults, pytest.mark.ray, pytest.mark.slow]
LIMIT_S = 1800
FIRST = "first-run.md"
"""The page whose `make train` leaves the run that the other pages use."""
SLOW = sorted(
    (block for block in SHOWN if block.marks.get("runs") in ("slow", "server") and "by" not in block.marks),
    key=lambda block: block.page.name != FIRST,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reader")


@pytest.fixture(scope="module")
def done():
    """Commands that ran already: the README shows some commands of the pages."""
    return set()


@pytest.mark.parametrize("block", SLOW, ids=lambda block: block.name)
def test_slow_commands_succeed(block, folder, done):
    fill(folder, block.page)
    script = "\n".join(line for line in block.script.splitlines() if line not in done)
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        if block.marks["runs"] == "server":
            assert_serves(process)
            return
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        end(process)
    assert process.returncode == 0, f"{script}\n{output[-4000:]}"
    assert block.marks.get("prints", "") in output, f"{script}\n{output[-4000:]}"
    done.update(block.script.splitlines())


def assert_serves(process):
    """Read the printed address and open it."""
    output, address = "", None
    while address is None:
        line = process.stdout.readline()
        assert line, f"no address was printed:\n{output[-4000:]}"
        output += line
        address = re.search(r"http://(127\.0\.0\.1|localhost):\d+[^\s\x1b]*", line)
    with suppress(urllib.error.HTTPError):  # the answer of a server that expects another kind of request
        urllib.request.urlopen(address[0], timeout=60).close()


def end(process):
    """End the process group: nothing that a script started may outlive the test."""
    for sent in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(timeout=10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def test_notebook_runs(folder, monkeypatch):
    notebook = nbformat.read(ROOT / "docs/first-run.ipynb", as_version=4)
    (settings,) = (block.marks["with"] for block in SHOWN if block.page.name == FIRST and "make train" in block.text)
    fill(folder, ROOT / "docs" / FIRST)
    for name, value in (environment() | dict([settings.replace("'", "").split("=", 1)])).items():
        monkeypatch.setenv(name, value)
    NotebookClient(notebook, timeout=LIMIT_S, resources={"metadata": {"path": str(folder)}}).execute()
