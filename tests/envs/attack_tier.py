"""The attack corpus against one tier of the sandbox, with the import check off. Prints the signs of an escape as JSON.

python tests/envs/throwaway.py python tests/envs/attack_tier.py --tier landlock [--seed K] [--without LAYER]

Without a layer the code may make calls that end in its own cell, so there only the canaries and the bounds count.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from attacks import SECRET, SLACK_S, Attack, all_attacks, left_over, placed_canaries, signs_of_escape

from envs.sandbox import Sandbox, SandboxSettings
from envs.types import ToolResult, ToolUnavailableError

AT_ONCE = 8
_TIMEOUT_S, _HANG_TIMEOUT_S = 2.0, 0.3


def attack_tier(tier: Any, seed: int, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run all attacks in an order drawn from `seed`, several at a time."""
    attacks = all_attacks()
    random.Random(seed).shuffle(attacks)
    folder = Path(tempfile.mkdtemp())
    settings = SandboxSettings(tier=tier, check_imports=False, memory_mb=512, disabled_layers=without)
    with placed_canaries(folder) as canaries, Sandbox(settings) as sandbox:

        def signs_of(attack: Attack) -> list[str]:
            code = canaries.place_in(attack["code"])
            timeout_s = _HANG_TIMEOUT_S if attack.get("hangs") else attack.get("timeout_s", _TIMEOUT_S)
            for _ in range(attack.get("repeat", 1)):
                started = time.monotonic()
                result = _run(sandbox, code, timeout_s=timeout_s)
                took_s = time.monotonic() - started
            signs = ["secret"] if SECRET in result.text else []
            signs += ["late"] if took_s > timeout_s + SLACK_S else []
            signs += ["long"] if len(result.text) > 25_000 else []
            if not without:
                signs += signs_of_escape(attack, result.text, result.error, tier=sandbox.state.tier)
            return [f"{attack['id']}: {sign}" for sign in signs]

        with ThreadPoolExecutor(AT_ONCE) as attackers:
            signs = [sign for signs in attackers.map(signs_of, attacks) for sign in signs]
        signs += canaries.touched()
        signs += [f"left over: {process}" for process in left_over(psutil.Process(sandbox.pid))]
        if sandbox.run("6 * 7").text != "42\n":
            signs.append("the sandbox does not compute")
        tier = sandbox.state.tier
    signs += [f"left over: {path}" for path in Path(tempfile.gettempdir()).glob("agentflow-sandbox-*")]
    return {"tier": tier, "num_attacks": len(attacks), "signs": signs}


def _run(sandbox: Sandbox, code: str, *, timeout_s: float) -> ToolResult:
    """Run an attack; a fault of the sandbox is a sign of an escape, too."""
    try:
        return sandbox.run(code, timeout_s=timeout_s)
    except ToolUnavailableError as fault:
        return ToolResult(text="", error=str(fault))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=("namespaces", "landlock"), required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the order (default 0)")
    parser.add_argument("--without", choices=("landlock", "seccomp"), action="append", default=[])
    options = parser.parse_args()
    print(json.dumps(attack_tier(options.tier, options.seed, tuple(options.without))))
