"""The attempts of a group as a prefix tree: siblings are columns, steps are rows, and equal steps are merged."""

from collections.abc import Mapping, Sequence
from typing import Any

from ray_jobs.viewer.rows import Row, shortened
from rollout.filters import SOLVED

_MOVE = ("action", "action_input", "result", "tool_error", "format_error")


def prefix_tree(records: Sequence[Mapping[str, Any]]) -> Row:
    """Return `order`, the ids of trajectory records from left to right, and `rows`, a list of cells for each step.

    A cell represents the attempts with the same decision and result after equal earlier steps. It has `first` and
    `span`, the columns that it covers; the decision and its result; and an advantage and a PRM score for each attempt,
    in the order of the columns. A row has no cells for attempts that have ended. Of several branches, the one with the
    larger share of right attempts comes first.
    """
    planned = {record["id"]: [turn for turn in record["turns"] if turn["role"] == "planner"] for record in records}
    right = {record["id"]: record["outcome"] == SOLVED for record in records}
    values = {record["id"]: (record.get("advantages") or (), record.get("prm_scores") or ()) for record in records}
    rows: list[list[Row]] = [[] for _ in range(max(map(len, planned.values()), default=0))]
    order: list[str] = []

    def place(members: Sequence[str], depth: int) -> None:
        branches: dict[tuple[str | None, ...], list[str]] = {}
        for one in members:
            branches.setdefault(_move(planned[one][depth]) if depth < len(planned[one]) else (), []).append(one)
        ranks = {move: -sum(right[one] for one in branch) / len(branch) for move, branch in branches.items()}
        for move, branch in sorted(branches.items(), key=lambda item: (ranks[item[0]], -len(item[1]))):
            first = len(order)
            if not move:
                order.extend(branch)
                continue
            cell: Row = dict(zip((*_MOVE, "said"), map(shortened, move), strict=True))
            rows[depth].append(cell)
            place(branch, depth + 1)
            advantages, scores = ([_at(values[one][which], depth) for one in order[first:]] for which in (0, 1))
            cell |= {"first": first, "span": len(branch), "advantages": advantages, "scores": scores}

    place(list(planned), 0)
    return {"order": order, "rows": rows}


def _move(turn: Mapping[str, Any]) -> tuple[str | None, ...]:
    # A malformed turn has no decision: only equal texts are equal moves.
    return *(turn[name] for name in _MOVE), turn["text"] if turn["action"] is None else None


def _at(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None
