"""The limits of the sandbox, its two tiers of walls, and which of them a machine can give."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Tier = Literal["namespaces", "landlock"]
WantedTier = Literal["auto", "namespaces", "landlock"]

REQUIRED_LAYERS: Mapping[Tier, frozenset[str]] = {
    "namespaces": frozenset({"namespaces", "rlimits", "seccomp"}),
    "landlock": frozenset({"landlock", "rlimits", "seccomp"}),
}
"""In the order of preference. `namespaces` hides the host's files and processes; `landlock` refuses them, and needs
nothing that a container's default profile forbids."""

MIN_LANDLOCK_VERSION = 6
"""The first that keeps signals and abstract sockets in; Linux 6.12 has it."""

_ADVICE = {
    "namespaces": "allow user namespaces to this user or container",
    "landlock": f"use Linux 6.12 or later, which has landlock {MIN_LANDLOCK_VERSION}",
    "seccomp": "allow the system call seccomp to this user or container",
}


def lacking(missing: Mapping[str, str], *, landlock_version: int) -> dict[Tier, dict[str, str]]:
    """Tier -> the layers that it requires and that are not there, with the reason. `missing` has these by layer."""
    lacks: dict[Tier, dict[str, str]] = {
        tier: {layer: missing[layer] for layer in sorted(required & set(missing))}
        for tier, required in REQUIRED_LAYERS.items()
    }
    if landlock_version < MIN_LANDLOCK_VERSION and "landlock" not in missing:
        lacks["landlock"]["landlock"] = f"this kernel has version {landlock_version}, {MIN_LANDLOCK_VERSION} is needed"
    return lacks


def choose_tier(wanted: WantedTier, lacks: Mapping[Tier, Mapping[str, str]]) -> Tier | None:
    """The wanted tier, for `auto` the first one that lacks nothing; None where there is none."""
    return next((tier for tier in REQUIRED_LAYERS if wanted in ("auto", tier) and not lacks[tier]), None)


def refusal(wanted: WantedTier, lacks: Mapping[Tier, Mapping[str, str]]) -> str:
    """Why no tier could be chosen, and what to do."""
    asked: list[Tier] = [tier for tier in REQUIRED_LAYERS if wanted in ("auto", tier)]
    reasons = "; ".join(
        f"tier '{tier}' lacks " + ", ".join(f"{layer} ({reason})" for layer, reason in lacks[tier].items())
        for tier in asked
    )
    advice = [_ADVICE[layer] for tier in asked for layer in lacks[tier] if layer in _ADVICE]
    advice += [f"set envs.sandbox.tier={tier}" for tier in REQUIRED_LAYERS if tier not in asked and not lacks[tier]]
    said = ", or ".join(dict.fromkeys(advice))
    return f"the code sandbox cannot start: {reasons}; {said}"


MAX_CODE_BYTES = 1 << 19
LAYERS = ("namespaces", "rlimits", "landlock", "seccomp")
"""namespaces: own pids, network, IPC and a private root. landlock and seccomp: what is left of the kernel."""

DISABLED_AT_MOST = frozenset({"landlock", "seccomp"})

_COMPUTING = "cmath decimal fractions math mpmath numbers numpy random statistics sympy"
_STRUCTURE = "bisect collections copy dataclasses enum functools heapq itertools operator typing"
_TEXT = "calendar datetime json re string textwrap time"
ALLOWED_IMPORTS = frozenset(f"{_COMPUTING} {_STRUCTURE} {_TEXT}".split())


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    memory_mb: int = 1024
    """Address space of one code process; about 160 MB of it are the libraries."""
    max_cpu_s: int = 600
    """CPU seconds of one code process over its whole life; each run has its own wall-clock limit."""
    max_output_chars: int = 16_384
    """Longer output loses its middle."""
    max_output_mb: int = 8
    """A run that prints more than this is killed."""
    max_file_mb: int = 4
    tmp_mb: int = 16
    """All files of an episode together."""
    max_files: int = 256
    max_open_files: int = 32
    max_code_bytes: int = 65_536
    max_concurrent_runs: int | None = None
    """Runs at once; None is two per core. The others wait, and their clock does not tick meanwhile."""
    check_imports: bool = True
    """Answer imports that are not on the list with a clear message. This is no boundary."""
    tier: WantedTier = "auto"
    """`auto` takes `namespaces` where the machine gives them, else `landlock`; nothing runs where neither is there."""
    idle_memory_mb: int = 2048
    """All episodes between two steps together, beyond what they share; the largest are ended above it."""
    disabled_layers: tuple[str, ...] = ()
    """Layers left out on purpose, to measure what the namespaces hold without them."""

    def __post_init__(self) -> None:
        if self.disabled_layers and (self.tier != "namespaces" or {*self.disabled_layers} - DISABLED_AT_MOST):
            raise ValueError(
                f"disabled_layers = {sorted(self.disabled_layers)}: only {', '.join(sorted(DISABLED_AT_MOST))} can be "
                "left out, and only with tier = 'namespaces'"
            )
        if not 0 < self.max_code_bytes <= MAX_CODE_BYTES:
            raise ValueError(f"max_code_bytes must be in 1..{MAX_CODE_BYTES}, got {self.max_code_bytes}")
