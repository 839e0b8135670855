"""What the choice of tasks is worth: sampled tokens until the demo's families are solved to the same rate.

    python -m benchmarks.choice_of_tasks --out runs/choice [--seeds 6] [--arms learnable mix] [--set key=value ...]

The demo with `envs.choice=learnable` against the same with `envs.choice=mix`. The end point is the mean of its three
families; how it is measured stands in `benchmarks/race.py`.
"""

from pathlib import Path

from benchmarks.race import Race, run
from ray_jobs.commands.given import DEFAULT_RECIPE

CHOICE = Race(
    recipe=DEFAULT_RECIPE,
    shared=("num_steps=30", "evaluation.num_untouched_tasks=0", "evaluation.num_tasks=20"),
    arms={"learnable": ("envs.choice=learnable",), "mix": ("envs.choice=mix",)},
    baseline="mix",
    families=("lookup", "two_lookup", "three_lookup"),
    target=0.5,
    measured=Path(__file__).parent / "measured" / "choice_of_tasks.jsonl",
)

if __name__ == "__main__":
    run(CHOICE, str(__doc__))
