"""At depth 0 a run is reproducible to the byte, also when it is killed and resumed."""

import json
import sys
import tempfile
import time
from pathlib import Path

from promised.promise import Measured, Promise
from ray_jobs.chaos.audit import audit
from ray_jobs.chaos.job import Job

NUM_STEPS = 2
LIMIT_S = 240


def reproduction(seed: int) -> Measured:
    """Two real runs of the synchronous recipe, one of which is killed with all its processes after a train step."""
    with tempfile.TemporaryDirectory(prefix="agentflow-") as folder:
        undisturbed, killed = (_job(Path(folder), name, seed) for name in ("undisturbed", "killed"))
        undisturbed.ensure_running()
        _finish(undisturbed)
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


def _job(folder: Path, name: str, seed: int) -> Job:
    command = [sys.executable, "-m", "ray_jobs.cli", "train", "configs/recipes/sync_cpu.toml"]
    settings = [f"name={name}", f"output_dir={folder}", f"seed={seed}", f"num_steps={NUM_STEPS}"]
    return Job(start=[*command, *settings, "evaluation.num_tasks=2"], folder=folder / name, log=folder / f"{name}.log")


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
