"""What the choice of tasks is worth: sampled tokens until the demo's families are solved to the same rate.

    python -m benchmarks.choice_of_tasks --out runs/choice [--seeds 6] [--arms learnable mix] [--set key=value ...]

The demo with `envs.choice=learnable` against the same with `envs.choice=mix`. The end point is the solve rate of 99
held-out tasks of its three families, asked every third train step: `learnable` repeats tasks, and new ones of a family
are solved less often. How it is measured stands in `benchmarks/race.py`.
"""

from pathlib import Path

from benchmarks.race import Race, run
from ray_jobs.cli_options import DEFAULT_RECIPE

CHOICE = Race(
    recipe=DEFAULT_RECIPE,
    shared=(
        "num_steps=30",
        "evaluation.num_untouched_tasks=0",
        "evaluation.num_tasks=99",
        "evaluation.every_steps=3",
        "evaluation.while_training_tasks=99",
    ),
    arms={"learnable": ("envs.choice=learnable",), "mix": ("envs.choice=mix",)},
    baseline="mix",
    families=("lookup", "two_lookup", "three_lookup"),
    target=0.5,
    measured=Path(__file__).parent / "measured" / "choice_of_tasks.jsonl",
    held_out=True,
)

if __name__ == "__main__":
    run(CHOICE, str(__doc__))
