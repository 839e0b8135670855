"""A copy of a run as it was before its RL phase, to go on from with `agentflow resume`."""

import json
import shutil
from pathlib import Path

from configs.run import RunConfig

FROM_RL = ("config.json", "tb", "checkpoints", "adapters", "ledger.sqlite*", "summary.json", "report.html", ".lock")
"""What the RL phase and those after it write, and the configuration."""


def copy_before_rl(run: Path, folder: Path, config: RunConfig) -> None:
    """Make `folder` anew: the run's cold start, PRM and evaluation before RL, under this configuration."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns(*FROM_RL))
    phases = json.loads((folder / "phases.json").read_text())
    kept = {name: phase for name, phase in phases.items() if name not in ("reinforce", "eval_after")}
    (folder / "phases.json").write_text(json.dumps(kept))
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
