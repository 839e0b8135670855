"""What the cluster knows of the processes behind actors."""

from typing import Any

from ray._private import state

SHOWN = 200


def num_restarts(actor: Any) -> int:
    """How often Ray has started an actor again; 0 for one that it does not know yet. Works with one that hangs."""
    row = state.actors(actor._actor_id.hex())
    return int(row["NumRestarts"]) if row else 0


def reason_of(error: BaseException) -> str:
    """Why an actor died or a call failed, in one line: what it raised while it was made, else what Ray says first and
    of which class it was."""
    lines = [line.strip() for line in str(getattr(error, "cause", error)).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if "creation task" in lines[0]:
        return lines[-1][:SHOWN]
    of_class = next((f" ({line})" for line in lines if line.startswith("class_name:")), "")
    return lines[0][:SHOWN] + of_class
