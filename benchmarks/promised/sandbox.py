"""What the code sandbox promises: no attack comes through either tier, and idle episodes hold bounded memory."""

import json
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil

from benchmarks.promised.promise import Measured, Promise
from envs.sandbox import Sandbox, SandboxSettings
from envs.sandbox.episode import resident_bytes

_ROOT = Path(__file__).parents[2]
_ATTACKS = _ROOT / "tests" / "envs"
_MIB = 1 << 20
_PATIENCE_S = 20.0
_RESTARTED = "[The interpreter was restarted"


def _attacks_held(tier: str, seed: int) -> Measured:
    """In namespaces where no attack could harm the host, and with the import check off."""
    attack = [sys.executable, _ATTACKS / "attack_tier.py", "--tier", tier, "--seed", str(seed)]
    done = subprocess.run(
        [sys.executable, _ATTACKS / "throwaway.py", *attack], capture_output=True, text=True, cwd=_ROOT, timeout=300
    )
    if done.returncode:
        return Measured((done.stderr.splitlines() or ["no word why"])[-1], holds=False)
    found = json.loads(done.stdout)
    text = f"{len(found['signs'])} escapes of {found['num_attacks']} attacks in tier {found['tier']}"
    held = found["tier"] == tier and not found["signs"] and found["num_attacks"] >= 150
    return Measured("; ".join([text, *found["signs"][:3]]), holds=held)


def _idle_memory_bounded(seed: int) -> Measured:
    """Episodes of drawn sizes, above a drawn bound; each of them is asked again."""
    draw = random.Random(seed)
    bound_mb, sizes_mb = draw.randint(150, 250), [draw.randint(40, 80) for _ in range(6)]
    with Sandbox(SandboxSettings(idle_memory_mb=bound_mb)) as sandbox:
        episodes = [sandbox.episode() for _ in sizes_mb]
        for episode, size_mb in zip(episodes, sizes_mb, strict=True):
            episode.run(f"import numpy as np\nx = np.ones({size_mb << 17})", timeout_s=60)
        deadline = time.monotonic() + _PATIENCE_S
        while (held_mb := _held_mb(sandbox)) > bound_mb and time.monotonic() < deadline:
            time.sleep(0.05)
        texts = [episode.run("'x' in globals()", timeout_s=60).text for episode in episodes]
        for episode in episodes:
            episode.close()
    kept, ended = texts.count("True\n"), sum(text.startswith(_RESTARTED) and "False" in text for text in texts)
    told = f"{sum(sizes_mb)} MB in {len(texts)} episodes: {held_mb} MB kept (bound {bound_mb}), {ended} say restarted"
    return Measured(told, holds=held_mb <= bound_mb and ended > 0 and kept > 0 and kept + ended == len(texts))


def _held_mb(sandbox: Sandbox) -> int:
    """By all code processes, beyond what the smallest process of the sandbox that holds nothing of its own has."""
    (zygote,) = psutil.Process(sandbox.pid).children()
    wardens = {process.pid: resident_bytes(process.pid) for process in zygote.children()}
    processes = {process.pid for process in zygote.children(recursive=True)} - set(wardens)
    shared = max(wardens.values(), default=0)
    return sum(max(0, resident_bytes(pid) - shared) for pid in processes) // _MIB


PROMISES = (
    Promise(
        name="sandbox-namespaces",
        said="No attack of the corpus comes through the tier 'namespaces', with the import check off",
        where="docs/sandbox.md",
        measure=partial(_attacks_held, "namespaces"),
    ),
    Promise(
        name="sandbox-landlock",
        said="No attack of the corpus comes through the tier 'landlock', which a default container allows",
        where="docs/sandbox.md",
        measure=partial(_attacks_held, "landlock"),
    ),
    Promise(
        name="sandbox-memory",
        said="Idle episodes hold at most 2,048 MB together; one that was ended says so",
        where="docs/sandbox.md",
        measure=_idle_memory_bounded,
    ),
)
