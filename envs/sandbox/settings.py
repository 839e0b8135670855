"""Limits of the sandbox, its two tiers of walls, and the choice of a tier on a machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Tier = Literal["namespaces", "landlock"]
WantedTier = Literal["auto", "namespaces", "landlock"]

REQUIRED_LAYERS: Mapping[Tier, frozenset[str]] = {
    "namespaces": frozenset({"namespaces", "rlimits", "seccomp"}),
    "landlock": frozenset({"landlock", "rlimits", "seccomp"}),
}
"""Tiers in the order of preference. `namespaces` hides the host's files and processes; `landlock` denies access to them
and works under a container's default profile."""

MIN_LANDLOCK_VERSION = 6
"""First version that confines signals and abstract sockets, in Linux 6.12."""

_ADVICE = {
    "namespaces": "allow user namespaces to this user or container",
    "landlock": f"use Linux 6.12 or later, which has landlock {MIN_LANDLOCK_VERSION}",
    "seccomp": "allow the system call seccomp to this user or container",
}


def lacking(missing: Mapping[str, str], *, landlock_version: int) -> dict[Tier, dict[str, str]]:
    """Return for each tier its required layers that are missing, with the reasons from `missing`."""
    lacks: dict[Tier, dict[str, str]] = {
        tier: {layer: missing[layer] for layer in sorted(required & set(missing))}
        for tier, required in REQUIRED_LAYERS.items()
    }
    if landlock_version < MIN_LANDLOCK_VERSION and "landlock" not in missing:
        lacks["landlock"]["landlock"] = f"this kernel has version {landlock_version}, not {MIN_LANDLOCK_VERSION}"
    return lacks


def choose_tier(wanted: WantedTier, lacks: Mapping[Tier, Mapping[str, str]]) -> Tier | None:
    """Return the wanted tier, or for `auto` the first, that lacks no layer; None if there is no such tier."""
    return next((tier for tier in REQUIRED_LAYERS if wanted in ("auto", tier) and not lacks[tier]), None)


def refusal(wanted: WantedTier, lacks: Mapping[Tier, Mapping[str, str]]) -> str:
    """Return the message for a machine without a usable tier, with the remedies."""
    allowed: list[Tier] = [tier for tier in REQUIRED_LAYERS if wanted in ("auto", tier)]
    reasons = "; ".join(
        f"tier '{tier}' lacks " + ", ".join(f"{layer} ({reason})" for layer, reason in lacks[tier].items())
        for tier in allowed
    )
    advice = [_ADVICE[layer] for tier in allowed for layer in lacks[tier] if layer in _ADVICE]
    advice += [f"set envs.sandbox={tier}" for tier in REQUIRED_LAYERS if tier not in allowed and not lacks[tier]]
    remedies = ", or ".join(dict.fromkeys(advice))
    return f"the code sandbox cannot start: {reasons}; {remedies}"


MAX_CODE_BYTES = 1 << 19
LAYERS = ("namespaces", "rlimits", "landlock", "seccomp")
"""namespaces: separate pids, network and IPC, and a private root. landlock and seccomp: limits on kernel calls."""

DISABLED_AT_MOST = frozenset({"landlock", "seccomp"})

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
        if self.disabled_layers and (self.tier != "namespaces" or {*self.disabled_layers} - DISABLED_AT_MOST):
            raise ValueError(
                f"disabled_layers = {sorted(self.disabled_layers)}: only {', '.join(sorted(DISABLED_AT_MOST))} can be "
                "left out, and only with tier = 'namespaces'"
            )
        if not 0 < self.max_code_bytes <= MAX_CODE_BYTES:
            raise ValueError(f"max_code_bytes must be in 1..{MAX_CODE_BYTES}, got {self.max_code_bytes}")
