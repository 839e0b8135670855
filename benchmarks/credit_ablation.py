"""Which credit learns faster, and which survives a bad process reward model: one table over arms and seeds.

    python benchmarks/credit_ablation.py --out runs/ablation [--seeds 3] [--steps 8] [--tasks 100]

Every seed runs the pipeline of the demo recipe once up to its trained PRM; each arm then starts RL from that same
cold-started policy. All arms of a seed take the same number of train steps of equally many trained groups. Arms
that are done are not run again.

random: the same network with a head of random weights. lenient: trained on labels in which thoughts and repeated
steps, which are of no use, score 1.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from configs.loading import load_run_config
from configs.run import RunConfig
from ray_jobs.policy_options import DEFAULT_RECIPE

ARMS = {
    "outcome only": ("outcome", "own"),
    "mixture": ("outcome_gated", "own"),
    "mixture, random PRM": ("outcome_gated", "random"),
    "mixture, lenient PRM": ("outcome_gated", "lenient"),
}
WINDOW = 3


def main() -> None:
    options = _options()
    for seed in range(options.seeds):
        base = f"seed{seed}-base"
        _pipeline(options, seed, base, num_steps=0)
        for arm, (credit, prm) in ARMS.items():
            name = f"seed{seed}-{arm.replace(', ', '-').replace(' ', '-')}"
            if not (options.out / name / "summary.json").exists():
                _prepare(options, seed, options.out / base, name, credit, prm)
                _pipeline(options, seed, name, num_steps=options.steps, credit=credit)
            print(f"{name}: {_summary(options.out / name)['solve_rate_after']:.3f}", flush=True)
    print(_table(options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=100)
    return parser.parse_args()


def _overrides(options: argparse.Namespace, seed: int, name: str, num_steps: int, credit: str) -> list[str]:
    return [
        f"name={name}",
        f"output_dir={options.out}",
        f"seed={seed}",
        f"num_steps={num_steps}",
        f"reward.credit={credit}",
        f"evaluation.num_tasks={options.tasks}",
        "evaluation.num_untouched_tasks=0",
    ]


def _pipeline(options: argparse.Namespace, seed: int, name: str, *, num_steps: int, credit: str = "outcome") -> None:
    if (options.out / name / "summary.json").exists():
        return
    command = [sys.executable, "-m", "ray_jobs.cli", "pipeline", str(DEFAULT_RECIPE)]
    subprocess.run([*command, *_overrides(options, seed, name, num_steps, credit)], check=True)


def _prepare(options: argparse.Namespace, seed: int, base: Path, name: str, credit: str, prm: str) -> None:
    """A copy of the base run from before its RL phase, with the arm's PRM."""
    config = load_run_config(DEFAULT_RECIPE, _overrides(options, seed, name, options.steps, credit))
    folder = options.out / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("tb", "checkpoints", "summary.json", "report.html"))
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    phases = json.loads((folder / "phases.json").read_text())
    kept = {name: phase for name, phase in phases.items() if name not in ("reinforce", "eval_after")}
    (folder / "phases.json").write_text(json.dumps(kept))
    if prm != "own":
        _replace_prm(config, folder, prm)


def _replace_prm(config: RunConfig, folder: Path, kind: str) -> None:
    import torch

    from ray_jobs.model_folder import resolve_model
    from reward.collected import CollectedGroups
    from reward.labels import read_labels
    from reward.plan_labels import HARMLESS, REPEATED
    from reward.prm import ProcessRewardModel
    from reward.prm_training import prm_data, train_prm

    prm = ProcessRewardModel(resolve_model(config.prm.model_path), config.prm, seed=config.seed)
    if kind == "random":
        torch.manual_seed(config.seed)
        torch.nn.init.normal_(prm.head.weight, std=2 / prm.backbone.hidden_size**0.5)
    else:
        useless = (HARMLESS, REPEATED)
        labels = [
            replace(one, score=1.0) if one.score in useless else one for one in read_labels(folder / "labels.jsonl")
        ]
        collected = list(CollectedGroups(folder / "collected").trajectories())
        steps = prm_data(collected, labels, held_out_share=config.prm.held_out_share).train
        for _ in train_prm(prm, steps, seed=config.seed):
            pass
    prm.save(folder / "prm", kind_of_prm=kind)


def _summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def _curve(folder: Path) -> Iterator[tuple[float, float]]:
    """(trajectories so far, solve rate while sampling over the last WINDOW steps)."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    rows = [row for row in rows if "policy/loss" in row]
    total = 0.0
    for index, row in enumerate(rows):
        total += row["rollout/trajectories"]
        last = rows[max(0, index - WINDOW + 1) : index + 1]
        right = sum(one["rollout/solve_rate"] * one["rollout/trajectories"] for one in last)
        yield total, right / sum(one["rollout/trajectories"] for one in last)


def _table(options: argparse.Namespace) -> str:
    lines = [
        "| arm | solved after RL, by seed | mean | 95% interval over seeds | trajectories to outcome-only's rate |",
        "| --- | --- | --- | --- | --- |",
    ]
    for arm in ARMS:
        folders = [
            options.out / f"seed{seed}-{arm.replace(', ', '-').replace(' ', '-')}" for seed in range(options.seeds)
        ]
        rates = [_summary(folder)["solve_rate_after"] for folder in folders]
        reached = [_reached(options, seed, folder) for seed, folder in enumerate(folders)]
        half = _half_width(rates)
        mean = statistics.mean(rates)
        lines.append(
            f"| {arm} | {', '.join(f'{100 * rate:.0f}%' for rate in rates)} | {100 * mean:.1f}% | "
            f"{100 * (mean - half):.1f} to {100 * (mean + half):.1f}% | {', '.join(reached)} |"
        )
    return "\n".join(lines)


def _reached(options: argparse.Namespace, seed: int, folder: Path) -> str:
    target = list(_curve(options.out / f"seed{seed}-outcome-only"))[-1][1]
    return next((f"{total:.0f}" for total, rate in _curve(folder) if rate >= target), "not reached")


def _half_width(rates: list[float]) -> float:
    """Student's t over the seeds."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(rates), 2.0)
    return t * statistics.stdev(rates) / len(rates) ** 0.5 if len(rates) > 1 else float("nan")


if __name__ == "__main__":
    main()
