"""The prefix tree of a group."""

from ray_jobs.viewer.run import prefix_tree


def turn(action, given, result="", **changes):
    decided = {"role": "planner", "thought": "t", "action": action, "action_input": given, "text": f"{action} {given}"}
    return {**decided, "result": result, "tool_error": None, "format_error": None, **changes}


def attempt(name, *turns, outcome=0.0, advantages=None, **changes):
    worth = {"advantages": advantages or [outcome] * len(turns), "prm_scores": [0.5] * len(turns)}
    return {"id": f"g/{name}", "outcome": outcome, "reward": outcome, "turns": list(turns), **worth, **changes}


LOOK = turn("search", "iron bolts", "12 kg")


def spans(tree):
    return [[(cell["first"], cell["span"], cell["action_input"]) for cell in row] for row in tree["rows"]]


def test_equal_steps_are_merged_and_right_attempts_come_first():
    tree = prefix_tree(
        [
            attempt(0, turn("answer", "99")),
            attempt(1, LOOK, turn("code", "34+12", "46"), turn("answer", "46")),
            attempt(2, LOOK, turn("code", "34*12", "408"), turn("answer", "408"), outcome=1.0),
            attempt(3, LOOK, turn("code", "34*12", "408"), turn("answer", "408"), outcome=1.0),
        ]
    )
    assert tree["order"] == ["g/2", "g/3", "g/1", "g/0"]
    assert spans(tree) == [
        [(0, 3, "iron bolts"), (3, 1, "99")],
        [(0, 2, "34*12"), (2, 1, "34+12")],
        [(0, 2, "408"), (2, 1, "46")],
    ]


def test_every_attempt_is_in_every_row_until_it_ends():
    attempts = [attempt(n, *[turn("search", str(n % k), "r") for k in range(1, 2 + n % 4)]) for n in range(12)]
    tree = prefix_tree(attempts)
    lengths = {one["id"]: len(one["turns"]) for one in attempts}
    for depth, row in enumerate(tree["rows"]):
        covered = [column for cell in row for column in range(cell["first"], cell["first"] + cell["span"])]
        assert covered == sorted(set(covered))
        assert {tree["order"][column] for column in covered} == {id for id, n in lengths.items() if n > depth}
