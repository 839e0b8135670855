"""What to do with a run that has ended, as commands that can be given as they stand."""

import shlex
from pathlib import Path

from rollout.records import head_of, whole_lines


def next_commands(run: Path) -> list[tuple[str, str]]:
    """Each with what it does; one is left out where the folder lacks what it needs."""
    folder = shlex.quote(str(run))
    commands = [(f"agentflow view {folder}", "why each step got its advantage")]
    question = _solved_question(run / "trajectories.jsonl")
    if question:
        policy = shlex.join(["--recipe", str(run / "config.json"), "--adapter", str(run)])
        commands.append((f"agentflow solve {shlex.quote(question)} {policy}", "ask the trained planner"))
    return commands


def _solved_question(trajectories: Path) -> str | None:
    """The first held-out question that the trained planner solved."""
    if not trajectories.exists():
        return None
    heads = map(head_of, whole_lines(trajectories))
    return next((one["question"] for one in heads if one["phase"] == "eval_after" and one["reward"] == 1.0), None)
