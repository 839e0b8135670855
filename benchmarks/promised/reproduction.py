"""At depth 0 a run is reproducible to the byte, also when it is killed and resumed."""

import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.before_rl import copy_before_rl
from benchmarks.promised.promise import Measured, Promise
from configs.loading import load_run_config
from tests.faults.audit import audit
from tests.faults.job import Job

RECIPE = Path("configs/recipes/sync_cpu.toml")
NUM_STEPS = 2
LIMIT_S = 1800


def reproduction(seed: int) -> Measured:
    """A real run of the synchronous recipe, and another from the same cold start, which is killed with all its
    processes after a train step and resumed."""
    with tempfile.TemporaryDirectory(prefix="agentflow-") as folder:
        undisturbed, killed = (_job(Path(folder), name, seed) for name in ("undisturbed", "killed"))
        undisturbed.ensure_running()
        _finish(undisturbed)
        copy_before_rl(undisturbed.folder, killed.folder, load_run_config(RECIPE, _settings(killed.folder, seed)))
        killed.ensure_running()
        _wait_for_a_train_step(killed)
        killed.kill("driver", killed.process.pid)
        killed.ensure_running()
        _finish(killed)
        digests = [_adapter_digest(job.folder) for job in (undisturbed, killed)]
        sound = audit(killed.folder)["sound"]
    same = digests[0] == digests[1]
    ledger = "sound" if sound else "not sound"
    text = f"undisturbed {digests[0][:12]}, killed and resumed {digests[1][:12]}; ledger {ledger}"
    return Measured(text, same and sound)


def _settings(folder: Path, seed: int) -> list[str]:
    own = [f"name={folder.name}", f"output_dir={folder.parent}", f"seed={seed}"]
    return [*own, f"num_steps={NUM_STEPS}", "evaluation.num_tasks=2"]


def _job(parent: Path, name: str, seed: int) -> Job:
    folder = parent / name
    command = [sys.executable, "-m", "ray_jobs.cli", "train", str(RECIPE), *_settings(folder, seed)]
    return Job(start=command, folder=folder, log=parent / f"{name}.log")


def _finish(job: Job) -> None:
    if job.process.wait(timeout=LIMIT_S) != 0:
        raise RuntimeError(f"the run {job.folder.name} failed: {job.log.read_text()[-500:]}")


def _wait_for_a_train_step(job: Job) -> None:
    metrics, deadline = job.folder / "metrics.jsonl", time.monotonic() + LIMIT_S
    while not (metrics.exists() and "policy/loss" in metrics.read_text()):
        if job.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run {job.folder.name} made no train step: {job.log.read_text()[-500:]}")
        time.sleep(0.1)


def _adapter_digest(folder: Path) -> str:
    newest = max((folder / "checkpoints").glob("v*"))
    return json.loads((newest / "manifest.json").read_text())["files"]["adapter.safetensors"]


PROMISES = [
    Promise(
        name="reproduction",
        said="At depth 0 a run that was killed and resumed ends with the bytes of one that was not",
        where="README.md",
        measure=reproduction,
    ),
]
