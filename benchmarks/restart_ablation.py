"""What restarts are worth: sampled tokens until tasks of several searches are solved.

    python -m benchmarks.restart_ablation --out runs/restarts [--seeds 6] [--arms roots ...] [--set key=value ...]

`configs/recipes/depth_cpu.toml` is cold-started mostly on wrong plans, so that several searches are almost never right.
The end point is the mean of `three_lookup` and `chain`; how it is measured stands in `benchmarks/race.py`.
"""

from pathlib import Path

from benchmarks.race import ROOT, Race, run

RESTARTS = Race(
    recipe=ROOT / "configs" / "recipes" / "depth_cpu.toml",
    shared=(
        "num_steps=40",
        "cold_start.wrong_share=0.91",
        "max_empty_batches=300",
        "evaluation.num_untouched_tasks=0",
        "evaluation.num_tasks=40",
    ),
    arms={
        "roots": (),
        "roots-of-four": ("rollout.group_size=4", "batch_groups=8"),
        "first-call": ("rollout.restarts.type=first_call",),
        "random": ("rollout.restarts.type=random",),
    },
    baseline="roots",
    families=("three_lookup", "chain"),
    target=0.6,
    measured=Path(__file__).parent / "measured" / "restart_ablation.jsonl",
)

if __name__ == "__main__":
    run(RESTARTS, str(__doc__))
