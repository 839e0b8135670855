"""What one choice of the recipe is worth: arms that differ in it alone, from the same cold start, over seeds.

    python -m benchmarks.ablation {credit,trust-region} --out runs/ablation [--seeds 3] [key=value ...]

For each seed `prm_cpu` runs whole: this is the first arm. Every other arm continues from a
copy of that run as it was before RL. All arms of a seed make the same number of train steps of equally many groups and
are evaluated on the same held-out tasks. What is done is not run again, and the ablations share the whole runs.

random PRM: the same network with a head of random weights. lenient PRM: trained on labels in which thoughts and
repeated steps, which are of no use, score 1.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.before_rl import copy_before_rl
from configs.loading import load_run_config
from configs.run import RunConfig
from ray_jobs.evaluation_folder import evaluation_in
from ray_jobs.statistics import PairedComparison, compare_paired
from rollout.records import read_records


@dataclass(frozen=True, slots=True)
class Arm:
    """A choice: `overrides` of the recipe, and which PRM takes the place of the run's own."""

    name: str
    overrides: tuple[str, ...] = ()
    prm: str = "own"


RECIPE = Path(__file__).parents[1] / "configs" / "recipes" / "prm_cpu.toml"
AS_SHIPPED = Arm("the recipe as it is")
ABLATIONS = {
    "credit": (
        AS_SHIPPED,
        Arm("outcome only", ("reward.credit=outcome",)),
        Arm("random PRM", prm="random"),
        Arm("lenient PRM", prm="lenient"),
    ),
    "trust-region": (
        AS_SHIPPED,
        Arm("no trust region", ("learner.loss.clip_low=0.999", "learner.loss.clip_high=1000")),
    ),
}
WINDOW = 3


def main() -> None:
    options = _options()
    arms = ABLATIONS[options.ablation]
    for seed in range(options.seeds):
        for arm in arms:
            if not (_folder(options, seed, arm) / "summary.json").exists():
                _run(options, seed, arm)
            print(
                f"seed {seed}, {arm.name}: {_summary(_folder(options, seed, arm))['solve_rate_after']:.3f}", flush=True
            )
    print(_table(options, arms))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ablation", choices=list(ABLATIONS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, in every arm")
    return parser.parse_args()


def _folder(options: argparse.Namespace, seed: int, arm: Arm) -> Path:
    name = f"seed-{seed}" if arm == AS_SHIPPED else f"seed-{seed}-{arm.name.replace(' ', '-')}"
    return Path(options.out / name)


def _run(options: argparse.Namespace, seed: int, arm: Arm) -> None:
    """Begin the arm, or go on with it where it was cut off."""
    folder = _folder(options, seed, arm)
    own = (f"name={folder.name}", f"output_dir={options.out}", f"seed={seed}")
    overrides = [*own, *options.overrides, *arm.overrides]
    command = ["resume", str(folder)]
    if not (folder / "config.json").exists():
        if arm == AS_SHIPPED:
            command = ["train", str(RECIPE), *overrides]
        else:
            config = load_run_config(RECIPE, overrides)
            copy_before_rl(_folder(options, seed, AS_SHIPPED), folder, config)
            if arm.prm != "own":
                _replace_prm(config, folder, arm.prm)
    subprocess.run([sys.executable, "-m", "ray_jobs.cli", *command], check=True)


def _replace_prm(config: RunConfig, folder: Path, kind: str) -> None:
    import torch

    from ray_jobs.phases.label import labels_of
    from ray_jobs.run.model_folder import resolve_model
    from reward.collected import CollectedGroups
    from reward.labels import read_labels
    from reward.labels.plan import HARMLESS, REPEATED
    from reward.prm.model import ProcessRewardModel
    from reward.prm.training import prm_data, train_prm

    prm = ProcessRewardModel(resolve_model(config.prm.model_path), config.prm, seed=config.seed)
    if kind == "random":
        torch.manual_seed(config.seed)
        torch.nn.init.normal_(prm.head.weight, std=2 / prm.backbone.hidden_size**0.5)
    else:
        useless = (HARMLESS, REPEATED)
        given = labels_of(config.label, read_labels(folder / "labels.jsonl"))
        labels = [replace(one, score=1.0) if one.score in useless else one for one in given]
        collected = list(CollectedGroups(folder / "collected").trajectories())
        steps = prm_data(collected, labels, held_out_share=config.prm.held_out_share).train
        for _ in train_prm(prm, steps, seed=config.seed):
            pass
    prm.save(folder / "prm", kind_of_prm=kind)


def _summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def _compared(first: Sequence[Path], others: Sequence[Path]) -> PairedComparison:
    """After RL, seed by seed, on the held-out tasks that both arms of a seed could score."""
    sides = [[evaluation_in(folder, "eval_after") for folder in folders] for folders in (first, others)]
    pairs = [pair for one, other in zip(*sides, strict=True) for pair in one.paired_with(other)]
    return compare_paired([one for one, _ in pairs], [other for _, other in pairs])


def _curve(folder: Path) -> Iterator[tuple[float, float]]:
    """(trajectories so far, solve rate while sampling over the last WINDOW steps)."""
    rows = [row for row in read_records(folder / "metrics.jsonl") if "policy/loss" in row]
    total = 0.0
    for index, row in enumerate(rows):
        total += row["rollout/trajectories"]
        last = rows[max(0, index - WINDOW + 1) : index + 1]
        right = sum(one["rollout/solve_rate"] * one["rollout/trajectories"] for one in last)
        yield total, right / sum(one["rollout/trajectories"] for one in last)


def _table(options: argparse.Namespace, arms: Sequence[Arm]) -> str:
    """Rates by seed, their mean with Student's t over the seeds, the difference to the first arm over all tasks of all
    seeds, paired, and the trajectories until the sampled solve rate with which the first arm ended."""
    lines = [
        "| arm | solved after RL, by seed | mean | 95% interval over seeds | against the first arm, paired | "
        "trajectories to the first arm's last rate |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    first = [_folder(options, seed, arms[0]) for seed in range(options.seeds)]
    targets = [list(_curve(folder))[-1][1] for folder in first]
    for arm in arms:
        folders = [_folder(options, seed, arm) for seed in range(options.seeds)]
        rates = [_summary(folder)["solve_rate_after"] for folder in folders]
        pairs = _compared(first, folders)
        low, high = (f"{100 * end:+.1f}" for end in pairs.ci95)
        against = f"{100 * pairs.gain:+.1f} points ({low} to {high}), p = {pairs.p:.2g}" if arm != arms[0] else ""
        reached = [_reached(folder, target) for folder, target in zip(folders, targets, strict=True)]
        mean, half = statistics.mean(rates), _half_width(rates)
        lines.append(
            f"| {arm.name} | {', '.join(f'{100 * rate:.1f}%' for rate in rates)} | {100 * mean:.1f}% | "
            f"{100 * (mean - half):.1f} to {100 * (mean + half):.1f}% | {against} | {', '.join(reached)} |"
        )
    return "\n".join(lines)


def _reached(folder: Path, target: float) -> str:
    return next((f"{total:.0f}" for total, rate in _curve(folder) if rate >= target), "not reached")


def _half_width(rates: Sequence[float]) -> float:
    """Student's t over the seeds."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(rates), 2.0)
    return t * statistics.stdev(rates) / len(rates) ** 0.5 if len(rates) > 1 else float("nan")


if __name__ == "__main__":
    main()
