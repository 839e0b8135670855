"""What the pages promise of the process reward model (PRM): it cannot take over."""

from padding_world import monitored, train

from configs.reward import AlarmConfig
from promised.promise import Measured, Promise
from reward.alarms import HackingMonitor

HEALTHY, HOSTILE = 0.85, (0.95, 1.0)
RUNS = 3
WEIGHT = 0.5


def measure_takeover(seed: int) -> Measured:
    """Runs in the small known world, with the alarms in the loop."""
    found = {padding: [_watched(padding, seed * RUNS + run) for run in range(RUNS)] for padding in (HEALTHY, *HOSTILE)}
    text = "; ".join(
        f"padding {padding:g}: accuracy {min(accuracy for accuracy, _ in runs):.2f} or more, alarms "
        + ", ".join(str(alarms) for _, alarms in runs)
        for padding, runs in found.items()
    )
    right = all(accuracy >= 0.9 for runs in found.values() for accuracy, _ in runs)
    quiet = not any(alarms for _, alarms in found[HEALTHY])
    seen = all(alarms for padding in HOSTILE for _, alarms in found[padding])
    return Measured(text, holds=right and quiet and seen)


def _watched(padding: float, seed: int) -> tuple[float, int]:
    """Accuracy at the end, and the number of alarms."""
    monitor = HackingMonitor(AlarmConfig(), WEIGHT)
    return train(monitored(monitor), padding=padding, seed=seed), len(monitor.alarms)


PROMISES = (
    Promise(
        name="prm-takeover",
        said="Where a PRM likes useless steps as much as useful ones, alarms lower its weight and the policy keeps "
        "solving; a lenient one that still ranks right attempts above wrong ones raises none.",
        where="docs/credit.md",
        measure=measure_takeover,
    ),
)
