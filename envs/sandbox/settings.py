"""Limits of the sandbox, its two tiers of walls, and the choice of a tier on a machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Tier = Literal["namespaces", "landlock"]
"""`namespaces` hides the host's files and processes, and has landlock too where the kernel has it. `landlock` denies
access to them and works under a container's default profile. Both have rlimits and seccomp."""
WantedTier = Literal["auto", "namespaces", "landlock"]

MIN_LANDLOCK_VERSION = 6
"""First version that confines signals and abstract sockets, in Linux 6.12."""

_ADVICE = {
    "namespaces": "allow user namespaces to this user or container",
    "landlock": f"use Linux 6.12 or later, which has landlock {MIN_LANDLOCK_VERSION}",
    "seccomp": "allow the system call seccomp to this user or container",
}

Lacks = Mapping[Tier, Mapping[str, str]]
"""For each tier the layers that this machine lacks, with the reasons. The stronger tier is first."""


def choose_tier(wanted: WantedTier, lacks: Lacks) -> Tier | None:
    """Return the wanted tier, or for `auto` the first, that lacks no layer; None if there is no such tier."""
    return next((tier for tier, missing in lacks.items() if wanted in ("auto", tier) and not missing), None)


def refusal(wanted: WantedTier, lacks: Lacks) -> str:
    """Return the message for a machine without a usable tier, with the remedies."""
    reasons, remedies = [], []
    for tier, missing in lacks.items():
        if wanted in ("auto", tier):
            layers = ", ".join(f"{layer} ({reason})" for layer, reason in missing.items())
            reasons.append(f"tier '{tier}' lacks {layers}")
            remedies += [_ADVICE[layer] for layer in missing]
    remedies += [f"set envs.sandbox={tier}" for tier, missing in lacks.items() if not missing]
    return f"the code sandbox cannot start: {'; '.join(reasons)}; {', or '.join(dict.fromkeys(remedies))}"


MAX_CODE_BYTES = 1 << 19
LAYERS = ("namespaces", "rlimits", "landlock", "seccomp")
"""namespaces: separate pids, network and IPC, and a private root. landlock and seccomp: limits on kernel calls."""

_COMPUTING = "cmath decimal fractions math mpmath numbers numpy random statistics sympy"
_STRUCTURE = "bisect collections copy dataclasses enum functools heapq itertools operator typing"
_TEXT = "calendar datetime json re string textwrap time"
ALLOWED_IMPORTS = frozenset(f"{_COMPUTING} {_STRUCTURE} {_TEXT}".split())


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Limits of a sandbox, from `envs.sandbox`."""

    memory_mb: int = 1024
    """Address space of one code process; about 160 MB of it are the libraries."""
    max_cpu_s: int = 600
    """CPU seconds of one code process over its whole life; each run has its own wall-clock limit."""
    max_output_chars: int = 16_384
    """The middle of longer output is cut."""
    max_output_mb: int = 8
    """A run that prints more than this is killed."""
    max_file_mb: int = 4
    tmp_mb: int = 16
    """All files of an episode together."""
    max_files: int = 256
    max_open_files: int = 32
    max_code_bytes: int = 65_536
    max_concurrent_runs: int | None = None
    """Concurrent runs; None is two per core. The time limit of a waiting run starts when it starts."""
    check_imports: bool = True
    """Reject imports that are not on the list with a clear message. This is not a boundary."""
    tier: WantedTier = "auto"
    """`auto` selects `namespaces` if the machine allows them, else `landlock`; without either no code is run."""
    idle_memory_mb: int = 2048
    """Private memory of all episodes between two steps together; above it the largest are ended."""
    disabled_layers: tuple[str, ...] = ()
    """Layers left out on purpose, to test the namespaces without them."""

    def __post_init__(self) -> None:
        if self.disabled_layers and (self.tier != "namespaces" or {*self.disabled_layers} - {"landlock", "seccomp"}):
            raise ValueError(
                f"disabled_layers = {self.disabled_layers}: only landlock and seccomp can be left out, and only with "
                "tier = 'namespaces'"
            )
        if not 0 < self.max_code_bytes <= MAX_CODE_BYTES:
            raise ValueError(f"max_code_bytes must be in 1..{MAX_CODE_BYTES}, got {self.max_code_bytes}")
