"""Wall seconds of RL until a skill is there, ours against TRL's GRPOTrainer, from the same start on the same CPU.

    python -m benchmarks.time_to_skill [--job clerk] [--seeds 0,1,2] [--threshold 0.8] [key=value ...]

There are two jobs, each a recipe, which key=value changes:

    expressions.toml    one reply: two steps in words become one expression
    clerk.toml          several calls: look up a lot, look up what its page names, answer with a number

For each seed our cold start makes an adapter, and both sides go on from it: the same model, LoRA, prompts token for
token in the same order, reward, 8 groups of 8 a train step, temperature 1, constant step size, DAPO loss with the same
clipping, no KL term. What calls bring stands between two replies token for token the same, and as many may call. TRL
bounds the tokens of an attempt as a whole, results included; ours bounds each reply. TRL has a thread for each of two
cores; so have our learner and, on the same cores, our engine.

The clock is that of RL alone. It starts when both are about to begin their first step, engine and model loaded, and
stands still while nobody trains. Adapters are saved on the way, with their seconds; one evaluator, our engine at the
temperature of training, gives each its rate on held-out tasks that neither RL nor the teacher asks. The first
evaluation at or above the threshold counts, and ends the curve; nothing is interpolated. TRL is ended there, or after
`--patience` times our seconds: then the ratio is a lower bound.

Ours is the system as it runs anything: Ray, an agent over the HTTP endpoint, vLLM, the ledger on disk, every version
published and proven, checkpoints, all of it on the clock; asynchronous at the recipe's depth. Groups without signal are
replaced by others, so that every step trains on 64 attempts that teach something. TRL trains on what it samples; its
own loop calls the clerk's function.
That, and who computes what how often, is the difference that is measured. `envs.choice = "learnable"` plays no part: it
chooses between generated families, and here is one task of one's own.

TRL is the pinned version in an environment of its own, run by `skill_peer.py`, with what suits a CPU as in
`against_trl.py`: all completions of a step in one batch of `generate`, no reference model, no gradient checkpointing,
no logging of texts, our allocator. Its saving and waiting are off the clock. Every one of `--trl-variants` makes two
steps first, and the one whose second step is the fastest runs, in one or several microbatches: weights in bfloat16
train under autocast, which is what a processor without units for it does 5 to 40 times slower, those in float32
without.

What is done is kept in `--out`, in a folder for each job a JSON file for each curve, and not run again; `curves.svg`
shows them.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.skill_curves import Curve, Point, drawing, table
from benchmarks.skill_job import ENDLESS, JOBS, MICROBATCHES, job_of, recipe, trl_job
from benchmarks.trl_environment import trl_process_environment, trl_python
from configs.loading import load_run_config
from configs.run import RunConfig
from envs.datasets.sampler import evaluation_tasks
from ray_jobs.evaluation_folder import Record
from ray_jobs.held_out import Evaluator, Wanted
from ray_jobs.phases.cold_start import cold_start
from ray_jobs.phases.local import open_policy
from ray_jobs.run.model_folder import resolve_model
from ray_jobs.run.preflight import check_before_start
from ray_jobs.run.run import open_run
from ray_jobs.train import reinforce
from rollout.engines.adapters import AdapterMerger
from rollout.worker import Worker

PEER = Path(__file__).with_name("skill_peer.py")
KILLED = (-9, 137)
"""Exit codes of a process that the system killed, which it does where memory runs out."""


@dataclass(frozen=True, slots=True)
class Saved:
    """An adapter's file; seconds of RL and attempts sampled until then."""

    step: int
    seconds: float
    sampled: int
    adapter: Path


def main() -> None:
    options = _options()
    options.out /= options.job
    options.out.mkdir(parents=True, exist_ok=True)
    pairs = []
    for seed in map(int, options.seeds.split(",")):
        pairs.append(measure(options, seed))
        print(table(pairs, options.threshold), flush=True)
        (options.out / "curves.svg").write_text(drawing(pairs, options.threshold))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--job", choices=JOBS, default=JOBS[0], help="one reply, or several calls")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--threshold", type=float, default=0.8, help="share of the held-out tasks that is the skill")
    parser.add_argument("--every", type=int, default=2, help="train steps from one evaluation to the next")
    parser.add_argument("--patience", type=float, default=6.0, help="TRL ends after so many times our seconds")
    parser.add_argument(
        "--trl-variants",
        help="dtype of TRL's weights and microbatches per train step, several with commas; the fastest runs (default: "
        "one and four microbatches, of the clerk four and eight, in the precision that this machine multiplies faster)",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/time-to-skill"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    return parser.parse_args()


def measure(options: argparse.Namespace, seed: int) -> tuple[Curve, Curve]:
    """Ours and TRL's; what is there already is read."""
    config, out = _config(options, f"ours-{seed}", seed), options.out
    ours = kept(out / f"ours-{seed}.json", partial(measure_ours, config, options.threshold))
    limit_s = options.patience * (ours.reached(options.threshold) or ours.points[-1]).seconds

    def measure_trl() -> Curve:
        trl = _config(options, f"trl-{seed}", seed)
        start, until = _start(config), (options.threshold, limit_s)
        return train_and_judge_trl(trl, start, fastest_variant(options, trl, start), every=options.every, until=until)

    return ours, kept(out / f"trl-{seed}.json", measure_trl)


def kept(path: Path, make: Callable[[], Curve]) -> Curve:
    """The curve that was measured before, or is now."""
    if not path.exists():
        path.write_text(json.dumps(asdict(make()), indent=1))
    row = json.loads(path.read_text())
    return Curve(**row | {"points": tuple(Point(**point) for point in row["points"])})


def _config(options: argparse.Namespace, name: str, seed: int) -> RunConfig:
    checkpoints = (f"learner.checkpoint_every={options.every}", f"learner.keep_checkpoints={ENDLESS}")
    own = (f"name={name}", f"output_dir={options.out}", f"seed={seed}", *checkpoints)
    return load_run_config(recipe(options.job), [*own, *options.overrides])


def _start(config: RunConfig) -> Path:
    """The adapter that the cold start of our run made."""
    (found,) = (config.run_path / "cold_start").glob("v*/adapter.safetensors")
    return found


# --- the evaluator -----------------------------------------------------------------------------------


class HeldOut:
    """The held-out tasks, each attempted once with the same random numbers for every adapter."""

    def __init__(self, config: RunConfig, worker: Worker, runner: asyncio.Runner) -> None:
        self._worker = worker
        self._runner = runner
        self._versions = count(1)
        self._evaluator = Evaluator(
            policy=worker,
            phase="held_out",
            temperature=config.rollout.temperature,
            max_attempts=config.evaluation.max_attempts,
        )
        self._wanted = [
            Wanted(task=task, seed=config.seed, trajectory_id=task.id, group_id="held_out")
            for task in evaluation_tasks(config)
        ]

    def point(self, arm: str, saved: Saved) -> Point:
        rate = self._runner.run(self._rate(saved.adapter.read_bytes()))
        print(f"{arm}: step {saved.step}, {saved.seconds:.1f} s of RL, {100 * rate:.1f}% of held-out tasks", flush=True)
        return Point(step=saved.step, seconds=saved.seconds, sampled=saved.sampled, rate=rate)

    async def _rate(self, adapter: bytes) -> float:
        await self._worker.engine.load_adapter(next(self._versions), adapter)
        records: list[Record] = []
        await self._evaluator.evaluate(self._wanted, records.append)
        return sum(record["reward"] for record in records) / len(records)


@contextmanager
def held_out(config: RunConfig) -> Iterator[HeldOut]:
    with open_policy(config, None) as worker, asyncio.Runner() as runner:
        yield HeldOut(config, worker, runner)


# --- ours --------------------------------------------------------------------------------------------


def measure_ours(config: RunConfig, threshold: float) -> Curve:
    saved, points = train_ours(config), list[Point]()
    with held_out(config) as judge:
        for one in saved:
            points.append(judge.point("ours", one))
            if points[-1].rate >= threshold:
                break
    return Curve(arm="ours", seed=config.seed, points=tuple(points))


def train_ours(config: RunConfig) -> list[Saved]:
    """A whole run anew, cold start and RL; an adapter's seconds are those until its checkpoint was whole."""
    shutil.rmtree(config.run_path, ignore_errors=True)
    with open_run(config, check_before_start(config), with_prm=False) as run:
        cold_start(run)
        began = time.time()
        reinforce(run)
    rows = [json.loads(line) for line in (config.run_path / "metrics.jsonl").open(encoding="utf-8")]
    sampled = {row["step"]: row["rollout/trajectories"] for row in rows if "policy/loss" in row}
    saved = [Saved(step=0, seconds=0.0, sampled=0, adapter=_start(config))]
    for manifest in sorted((config.run_path / "checkpoints").glob("v*/manifest.json")):
        step = json.loads(manifest.read_text())["step"]
        saved.append(
            Saved(
                step=step,
                seconds=manifest.stat().st_mtime - began,
                sampled=round(sum(num for one, num in sampled.items() if one <= step)),
                adapter=manifest.with_name("adapter.safetensors"),
            )
        )
    return saved


# --- TRL's -------------------------------------------------------------------------------------------


def fastest_variant(options: argparse.Namespace, config: RunConfig, start: Path) -> str:
    """By its second step; the trial is made once, and kept. A single variant needs none."""
    precision, trial = config.learner.precision, options.out / "trial.json"
    usual = ",".join(f"{precision}:{number}" for number in MICROBATCHES[job_of(config)])
    variants: list[str] = (options.trl_variants or usual).split(",")
    if len(variants) == 1:
        return variants[0]
    found: dict[str, float] = json.loads(trial.read_text()) if trial.exists() else {}
    for variant in variants:
        if variant not in found:
            ends: list[float] = []

            def heard(one: Saved, ends: list[float] = ends) -> bool:
                ends.append(one.seconds)
                return one.step < 2

            train_trl(config, start, variant, every=1, heard=heard)
            found[variant] = ends[2] - ends[1]
            print(f"TRL, {variant}: {found[variant]:.1f} s in its second step", flush=True)
            trial.write_text(json.dumps(found))
    return min(variants, key=found.__getitem__)


def train_and_judge_trl(
    config: RunConfig, start: Path, variant: str, *, every: int, until: tuple[float, float]
) -> Curve:
    """`until`: a rate on held-out tasks, or seconds of RL."""
    points: list[Point] = []
    with held_out(config) as judge:

        def heard(one: Saved) -> bool:
            points.append(judge.point(f"TRL, {variant}", one))
            return points[-1].rate < until[0] and one.seconds < until[1]

        train_trl(config, start, variant, every=every, heard=heard)
    return Curve(arm=f"TRL, {variant}", seed=config.seed, points=tuple(points))


def train_trl(config: RunConfig, start: Path, variant: str, *, every: int, heard: Callable[[Saved], bool]) -> None:
    """`heard` is told of every adapter while the trainer waits for it, and says whether to go on."""
    folder, model_path = config.run_path, resolve_model(config.model.path)
    shutil.rmtree(folder, ignore_errors=True)
    scale = config.model.lora_alpha / config.model.lora_rank
    AdapterMerger(model_path, scale).write_adapter_folder(folder / "start", start.read_bytes())
    job = trl_job(config, folder / "start", variant, every=every)
    (folder / "job.json").write_text(json.dumps(job))
    listen([str(trl_python()), str(PEER), str(folder / "job.json")], config, heard)


def listen(command: Sequence[str], config: RunConfig, heard: Callable[[Saved], bool]) -> None:
    """Run the trainer; what it writes to stderr is in the folder's `log.txt`. Ends the process where it fails."""
    per_step, log = config.batch_groups * config.rollout.group_size, config.run_path / "log.txt"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = trl_process_environment(config)
    with log.open("w") as written, subprocess.Popen(command, env=environment, stderr=written, **pipes) as peer:
        for line in peer.stdout or ():
            said = json.loads(line)
            saved = Saved(said["step"], said["seconds"], said["step"] * per_step, Path(said["adapter"]))
            print("go on" if heard(saved) else "stop", file=peer.stdin, flush=True)
    if peer.returncode in KILLED:
        sys.exit(
            f"TRL was killed with exit code {peer.returncode}, most likely because memory ran out: give its train step "
            "more microbatches, as in --trl-variants float32:16"
        )
    if peer.returncode:
        sys.exit(f"TRL failed with exit code {peer.returncode}: see {log}")


if __name__ == "__main__":
    main()
