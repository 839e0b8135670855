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
    in the order of the columns. A row has no cells for attempts that have ended.
    """
    steps = [_steps(record) for record in records]
    columns = _ordered(records, steps, list(range(len(records))), 0)
    rows = []
    for depth in range(max(map(len, steps), default=0)):
        cells: list[Row] = []
        for column, number in enumerate(columns):
            if depth >= len(steps[number]):
                continue
            step = steps[number][depth]
            left, right = (
                [earlier["move"] for earlier in steps[at][: depth + 1]] for at in (columns[column - 1], number)
            )
            # A cell is extended by its neighbour if all moves up to this one are equal.
            if not cells or cells[-1]["first"] + cells[-1]["span"] != column or left != right:
                texts = {name: shortened(step["move"][at]) for at, name in enumerate(_MOVE)}
                cells.append(
                    {"first": column, "span": 0, "advantages": [], "scores": [], "said": step["said"], **texts}
                )
            cells[-1]["span"] += 1
            cells[-1]["advantages"].append(step["advantage"])
            cells[-1]["scores"].append(step["score"])
        rows.append(cells)
    return {"order": [records[number]["id"] for number in columns], "rows": rows}


def _steps(record: Mapping[str, Any]) -> list[Row]:
    turns = [turn for turn in record["turns"] if turn["role"] == "planner"]
    advantages, scores = record.get("advantages") or (), record.get("prm_scores") or ()
    return [
        {
            # A malformed turn has no decision: only equal texts are equal moves.
            "move": (*(turn[name] for name in _MOVE), turn["text"] if turn["action"] is None else ""),
            "said": shortened(turn["text"]) if turn["action"] is None else None,
            "advantage": advantages[index] if index < len(advantages) else None,
            "score": scores[index] if index < len(scores) else None,
        }
        for index, turn in enumerate(turns)
    ]


def _ordered(
    records: Sequence[Mapping[str, Any]], steps: Sequence[Sequence[Row]], members: list[int], depth: int
) -> list[int]:
    # Attempts that agree are neighbours. The branch with the larger share of right attempts comes first.
    branches: dict[object, list[int]] = {}
    for number in members:
        branches.setdefault(steps[number][depth]["move"] if depth < len(steps[number]) else None, []).append(number)

    def worth(branch: list[int]) -> tuple[float, int, int]:
        right = sum(records[number].get("outcome", records[number]["reward"]) == SOLVED for number in branch)
        return -right / len(branch), -len(branch), branch[0]

    order: list[int] = []
    for move in sorted(branches, key=lambda move: worth(branches[move])):
        order += branches[move] if move is None else _ordered(records, steps, branches[move], depth + 1)
    return order
