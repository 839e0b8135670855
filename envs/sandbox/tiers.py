"""The two tiers of walls: what each requires, and which of them a machine can give."""

from collections.abc import Mapping
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
