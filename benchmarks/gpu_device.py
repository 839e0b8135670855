"""The first minutes on a card: facts, shared memory between processes, attention, a learner's step, vLLM's steps.

    python -m benchmarks.gpu_device --out DIR [--pieces .gpu] [--steps facts,ipc,attention] [--rehearsal]

Each step runs in a process of its own with a time limit of its own, and leaves DIR/<step>.json as it ends: what was
expected beside what was measured, with a verdict. What a step prints is in DIR/<step>.log. A step that needs what is
not there says so and is skipped; one that fails or takes too long leaves the others alone. What is in DIR already is
not run again, unless it was skipped.

    facts                 the card, its speed in matrix products and copies, driver, kernel, libraries.
    ipc                   one process holds the weights of a model, another maps them; either is killed.
    attention             the learner's fused attention against blocks and against padded attention, with its error.
    extension             vLLM's compiled extension under this PyTorch.
    learner               a train step at Qwen3-8B's sizes with the recipe's settings, within an A40's memory.
    engine                `VllmEngine` with native adapters at a small size: grammar, log-probs, versions.
    decoding              Qwen3-8B's sizes with 17.7 GiB of KV cache: tokens/s, and how long decoding stands still
                          while adapters are loaded.
    decoding-small-cache  the same with the 3 GiB of the recipe.
    decoding-in-step      the same without scheduling ahead.
    together              one copy of Qwen3-8B's base, an engine and a learner that read it: speed of each alone and
                          of both, memory of all, and the gap of their log-probs.
    run                   the demo model in a whole run, with one copy of the base weights: Ray's actors on one card.
    run-sync              the same in lockstep.

`--pieces` is a folder of pieces of `gpu_pack`: those that are there are unpacked into its folder `site`, from which the
steps import what the machine lacks.

`--rehearsal` runs the same code on the CPU at tiny sizes. It proves the steps, not the card: only what must hold on
any machine is judged then.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.expected import card_of, expectations
from benchmarks.gpu.stage import Found, MissingError, Stage
from benchmarks.gpu.unpack import unpack

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`place` is `module:function`, which takes a `Stage` and returns a `Found`. `env` is set for its process."""

    place: str
    limit_s: int
    env: Mapping[str, str] = field(default_factory=dict)


AS_IN_A_RUN = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""What a run sets for its learner on a card."""
STEPS = {
    "facts": Step(place="benchmarks.gpu.facts:facts", limit_s=90),
    "ipc": Step(place="benchmarks.gpu.sharing:sharing", limit_s=120),
    "attention": Step(place="benchmarks.gpu.attention:attention", limit_s=240),
    "extension": Step(place="benchmarks.gpu.facts:extension", limit_s=60),
    "learner": Step(place="benchmarks.gpu.learner:learner", limit_s=300, env=AS_IN_A_RUN),
    "engine": Step(place="benchmarks.gpu.engine:engine", limit_s=300),
    "decoding": Step(place="benchmarks.gpu.decoding:decoding", limit_s=300),
    "decoding-small-cache": Step(place="benchmarks.gpu.decoding:small_cache", limit_s=240),
    "decoding-in-step": Step(place="benchmarks.gpu.decoding:in_step", limit_s=240),
    "together": Step(place="benchmarks.gpu.together:together", limit_s=420),
    "run": Step(place="benchmarks.gpu.run:run", limit_s=540),
    "run-sync": Step(place="benchmarks.gpu.run:run_sync", limit_s=540),
}


def judged(step: str, result: Found, *, card: str, rehearsal: bool) -> list[dict[str, Any]]:
    """One row per expectation, then what was measured beside. `passed` is None where nothing is judged."""
    expected = expectations(step, card_of(card), dict(result.planned))
    rows: list[dict[str, Any]] = []
    for name, one in expected.items():
        measured = result.values.get(name)
        asked = one.everywhere or not rehearsal
        passed = (measured is not None and one.passes(measured)) if asked else None
        rows.append({"name": name, **asdict(one), "expected": one.value, "measured": measured, "passed": passed})
    return rows


REHEARSAL_PATIENCE = 5
"""Times a step's limit that it may take on a CPU."""


def run_here(name: str, stage: Stage) -> None:
    """The step, in this process; leaves its file."""
    import torch

    card = "" if stage.rehearsal else _card_name(torch)
    module, function = STEPS[name].place.split(":")
    started = time.perf_counter()
    record: dict[str, Any] = {"step": name, "rehearsed": stage.rehearsal, "card": card}
    try:
        if not stage.rehearsal and not card:
            raise MissingError("this machine has no card; --rehearsal runs on the CPU")
        result = _function(module, function)(stage)
        record |= {
            "checks": judged(name, result, card=card, rehearsal=stage.rehearsal),
            "told": result.told,
        }
    except MissingError as missing:
        record["skipped"] = str(missing)
    except Exception as error:
        traceback.print_exc()
        record["failed"] = f"{type(error).__name__}: {error}"
    record["seconds"] = round(time.perf_counter() - started, 1)
    _write(stage.out / f"{name}.json", record)


def _function(module: str, name: str) -> Callable[[Stage], Found]:
    """Raises MissingError where the module needs another one that is not there."""
    try:
        found: Callable[[Stage], Found] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as missing:
        raise MissingError(f"{missing.name} cannot be imported") from missing
    return found


def _card_name(torch: Any) -> str:
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""


def unpacked(pieces: Path) -> Path:
    """The folder with what the pieces hold that are there; each is unpacked once."""
    site = pieces / "site"
    for manifest in sorted(pieces.glob("p*/manifest.json")):
        done = site / f"{manifest.parent.name}.json"
        if not done.exists() or done.read_bytes() != manifest.read_bytes():
            unpack(manifest.parent, site)
            shutil.copy(manifest, done)
    return site


def run_apart(name: str, stage: Stage, limit_s: float) -> dict[str, Any]:
    """The step in a process of its own, and everything that it started ended after it; returns what it left."""
    path = stage.out / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_device", "--out", str(stage.out), "--only", name]
    with (stage.out / f"{name}.log").open("w") as log:
        child = subprocess.Popen(
            command + ["--rehearsal"] * stage.rehearsal,
            env={**os.environ, **STEPS[name].env},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            why = f"ended with code {child.wait(timeout=limit_s)}"
        except subprocess.TimeoutExpired:
            why = f"ran past its {limit_s:g} s"
        finally:
            _end_group(child.pid)
            child.wait()
    if not path.exists():
        _write(path, {"step": name, "rehearsed": stage.rehearsal, "failed": f"{why}; see {name}.log"})
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _done(path: Path) -> dict[str, Any] | None:
    """What a step left that is not to be run again. What it lacked when it was skipped may have come."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"skipped": ""}
    return None if "skipped" in record else record


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _write(path: Path, record: Mapping[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1, default=str) + "\n")
    partial.rename(path)


def show(records: Sequence[Mapping[str, Any]]) -> None:
    """The final table, as plain text: it may be all that comes back."""
    for record in records:
        name = f"{record['step']}{' (rehearsal)' if record['rehearsed'] else ''}"
        if why := record.get("skipped"):
            print(f"{name}: SKIPPED, {why}")
        elif why := record.get("failed"):
            print(f"{name}: FAILED, {why}")
        else:
            print(f"{name}: {record['seconds']} s")
        for row in record.get("checks", ()):
            verdict = {True: "pass", False: "FAIL", None: "-"}[row["passed"]]
            print(
                f"  {verdict:4}  {row['name']:<24} expected {_shown(row['expected'])}, measured "
                f"{_shown(row['measured'])} {row['unit']} ({row['source']})"
            )


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def is_good(record: Mapping[str, Any]) -> bool:
    """Nothing failed; a step that was skipped did not."""
    return "failed" not in record and all(row["passed"] is not False for row in record.get("checks", ()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--pieces", type=Path, default=None, help="folder of the pieces of gpu_pack that have come")
    parser.add_argument("--steps", default=",".join(STEPS), help="which, by name, with commas between them")
    parser.add_argument("--rehearsal", action="store_true", help="the same code on the CPU at tiny sizes")
    parser.add_argument("--limit", type=float, default=None, help="seconds for each step, not its own")
    parser.add_argument("--only", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    stage = Stage(out=options.out.absolute(), rehearsal=options.rehearsal)
    stage.out.mkdir(parents=True, exist_ok=True)
    if options.only:
        run_here(options.only, stage)
        return 0
    names = [name for name in options.steps.split(",") if name]
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"--steps names '{unknown[0]}'; known: {', '.join(STEPS)}")
    if options.pieces:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(unpacked(options.pieces.absolute())), str(ROOT)])
    records = []
    for name in names:
        limit_s = options.limit or STEPS[name].limit_s * (REHEARSAL_PATIENCE if options.rehearsal else 1)
        records.append(_done(stage.out / f"{name}.json") or run_apart(name, stage, limit_s))
        show(records[-1:])
    good = sum(map(is_good, records))
    print(f"{good} of {len(records)} steps without a fault")
    return int(good < len(records))


if __name__ == "__main__":
    sys.exit(main())
