"""Process credit against outcome credit: arms that differ in the credit alone, from the same cold start, over seeds.

    python -m benchmarks.ablation --out runs/ablation [--seeds 3] [key=value ...]

For each seed the recipe `prm_cpu` runs completely: this is the first arm. Every other arm continues from a copy of that
run as it was before RL. All arms of a seed make the same number of train steps of equally many groups and are evaluated
on the same held-out tasks. Finished runs are not repeated.

    process       the recipe: outcome and process rewards.
    outcome only  outcome rewards alone.
    random PRM    a PRM of the same network whose head has random weights.
    lenient PRM   a PRM trained on labels that give useless steps (thoughts, repeated steps) a score of 1.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.runs import agentflow, compare_after_rl, copy_before_rl, train, train_steps
from configs.loading import load_run_config
from configs.run import RunConfig
from ray_jobs.evaluation import evaluation_in
from ray_jobs.statistics import wilson_interval

RECIPE = Path(__file__).parents[1] / "configs" / "recipes" / "prm_cpu.toml"
ARMS = ("process", "outcome only", "random PRM", "lenient PRM")
WINDOW = 3
"""Train steps over which a sampled solve rate is averaged."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of all runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe in every arm")
    options = parser.parse_args()
    for seed in range(options.seeds):
        for arm in ARMS:
            run_arm(options.out, seed, arm, options.overrides)
    print(table(options.out, options.seeds))


def folder_of(out: Path, seed: int, arm: str) -> Path:
    return out / f"seed-{seed}-{arm.replace(' ', '-')}"


def run_arm(out: Path, seed: int, arm: str, overrides: Sequence[str]) -> None:
    """Run one arm of one seed, or continue it where it was interrupted."""
    folder, base = folder_of(out, seed, arm), folder_of(out, seed, ARMS[0])
    own = [f"seed={seed}", *overrides, *(["reward.credit=outcome"] if arm == "outcome only" else [])]
    if arm in ("process", "outcome only"):
        train(RECIPE, folder, own, start_from=None if arm == "process" else base)
        return
    if not (folder / "config.json").exists():
        config = load_run_config(RECIPE, [f"name={folder.name}", f"output_dir={out}", *own])
        copy_before_rl(base, folder, config.model_dump(mode="json"))
        replace_prm(config, folder, lenient=arm == "lenient PRM")
    if not (folder / "summary.json").exists():
        agentflow("resume", str(folder))


def replace_prm(config: RunConfig, folder: Path, *, lenient: bool) -> None:
    """Save a PRM with a random head, or one trained on lenient labels, as the PRM of the run."""
    import torch

    from ray_jobs.prm import CollectedGroups, labels_of
    from ray_jobs.run.model_folder import resolve_model
    from reward.labels import read_labels
    from reward.labels.plan import HARMLESS, REPEATED
    from reward.prm.model import ProcessRewardModel
    from reward.prm.training import prm_data, train_prm

    prm = ProcessRewardModel(resolve_model(config.prm.model_path), config.prm, seed=config.seed)
    if lenient:
        labels = labels_of(config.label, read_labels(folder / "labels.jsonl"))
        labels = [replace(label, score=1.0) if label.score in (HARMLESS, REPEATED) else label for label in labels]
        collected = list(CollectedGroups(folder / "collected").trajectories())
        steps = prm_data(collected, labels).train
        for _ in train_prm(prm, steps, seed=config.seed):
            pass
    else:
        torch.manual_seed(config.seed)
        torch.nn.init.normal_(prm.head.weight, std=2 / prm.backbone.hidden_size**0.5)
    prm.save(folder / "prm", kind_of_prm="lenient" if lenient else "random")


def sampled_rates(folder: Path) -> Iterator[tuple[float, float]]:
    """Yield (trajectories so far, solve rate while sampling over the last WINDOW steps)."""
    rows, total = train_steps(folder), 0.0
    for index, row in enumerate(rows):
        total += row["rollout/trajectories"]
        window = rows[max(0, index - WINDOW + 1) : index + 1]
        solved = sum(one["rollout/solve_rate"] * one["rollout/trajectories"] for one in window)
        yield total, solved / sum(one["rollout/trajectories"] for one in window)


def table(out: Path, seeds: int) -> str:
    """Return one row per arm: solve rates, the paired difference to the first arm, and the sampling it needed."""
    lines = [
        "| arm | solved after RL, by seed | all seeds, 95% interval | against the first arm, paired | "
        "trajectories until the first arm's last sampled rate |",
        "| --- | --- | --- | --- | --- |",
    ]
    first = [folder_of(out, seed, ARMS[0]) for seed in range(seeds)]
    targets = [list(sampled_rates(folder))[-1][1] for folder in first]
    for arm in ARMS:
        folders = [folder_of(out, seed, arm) for seed in range(seeds)]
        solved = [list(evaluation_in(folder, "eval_after").solved.values()) for folder in folders]
        low, high = wilson_interval(sum(map(sum, solved)), sum(map(len, solved)))
        difference = "" if arm == ARMS[0] else compare_after_rl(first, folders).verdict
        reached = [
            next((f"{total:.0f}" for total, rate in sampled_rates(folder) if rate >= target), "not reached")
            for folder, target in zip(folders, targets, strict=True)
        ]
        rates = ", ".join(f"{statistics.mean(one):.1%}" for one in solved)
        lines.append(f"| {arm} | {rates} | {low:.1%} to {high:.1%} | {difference} | {', '.join(reached)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
