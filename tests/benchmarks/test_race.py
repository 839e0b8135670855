"""When an arm has reached the target, what it had sampled by then, and how arms are compared."""

import json

from benchmarks.choice_of_tasks import CHOICE
from benchmarks.race import Ended, ended, table
from benchmarks.restart_ablation import RESTARTS
from rollout.store.choice import Draw
from rollout.store.ledger import Ledger
from rollout.store.lifecycle import GroupResult


def play(ledger, step, *groups):
    """Groups of this family with so many of four attempts right, 100 sampled tokens each; the last ones had forks."""
    first = ledger.next_task
    permits = ledger.lease(0, len(groups), num_new=len(groups), draw_of=lambda task: Draw(groups[task - first][0]))
    for permit, (_, right, fork_tokens) in zip(permits, groups, strict=True):
        facts = {"sampled_tokens": 100.0, "fork_tokens": fork_tokens}
        result = GroupResult(ending="ready", payload=b"", versions={}, right=right, scored=4, facts=facts)
        ledger.settle(permit.lease, "ready", result, now=0.0)
    ledger.cut([permit.ordinal for permit in permits], step)
    ledger.mark_trained(step)


def make_run(folder):
    """Over five steps `chain` solves 7 of 16 by step 5, 11 of 16 by step 6, 14 of 16 by step 7; `three_lookup` 2 of 4,
    2 of 4, 5 of 8."""
    folder.mkdir()
    ledger = Ledger(folder / "ledger.sqlite")
    play(ledger, 1, ("lookup", 4, 0.0), ("chain", 0, 50.0))
    play(ledger, 2, ("chain", 1, 0.0))
    play(ledger, 3, ("three_lookup", 2, 0.0))
    play(ledger, 4, ("chain", 2, 0.0))
    play(ledger, 5, ("chain", 4, 0.0))
    play(ledger, 6, ("chain", 4, 0.0))
    play(ledger, 7, ("chain", 4, 0.0), ("three_lookup", 3, 0.0))
    play(ledger, 8, ("chain", 4, 0.0))
    ledger.close()
    rows = [{"step": step, "policy/loss": 0.0, "time/step_s": 10.0} for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_tokens_are_those_of_all_roots_and_forks_until_the_hard_families_are_solved(tmp_path):
    assert ended(RESTARTS, make_run(tmp_path / "arm"), seed=3, arm="roots") == Ended(
        seed=3, arm="roots", tokens=950.0, steps=7, wall_s=70.0, reached=True, first_rate=0.4688, last_rate=0.75
    )


def test_where_arms_draw_other_tasks_the_target_is_one_of_held_out_tasks(tmp_path):
    """0.4 after step 3, 0.6 after step 6, 750 tokens with those of a fork; in training `two_lookup` was never drawn."""
    folder = make_run(tmp_path / "arm")
    with (folder / "metrics.jsonl").open("a") as rows:
        for step, rate in ((3, 0.4), (6, 0.6)):
            rows.write(json.dumps({"step": step, "held_out/solve_rate": rate}) + "\n")
    found = ended(CHOICE, folder, seed=0, arm="learnable")
    assert (found.reached, found.steps, found.tokens) == (True, 6, 750.0)
    assert (found.first_rate, found.last_rate) == (0.4, 0.6)


def test_an_arm_that_has_not_begun_has_reached_nothing(tmp_path):
    assert not ended(RESTARTS, tmp_path, seed=0, arm="roots").reached


def test_arms_are_compared_seed_by_seed_and_what_was_not_reached_is_marked():
    """Twice and eight times fewer: four times, the mean of the logs."""

    def arm(name, seed, tokens, reached=True):
        rates = {"first_rate": 0.0, "last_rate": 0.6}
        return Ended(seed=seed, arm=name, tokens=tokens, steps=9, wall_s=60.0, reached=reached, **rates)

    rows = [arm("roots", 0, 8000.0), arm("roots", 1, 16000.0, reached=False), arm("random", 0, 4000.0)]
    said = table(RESTARTS, [*rows, arm("random", 1, 2000.0), arm("first-call", 1, 8000.0)]).splitlines()
    assert said[2] == "| `roots` | 8, > 16 |  | 60 |"
    assert said[3] == "| `first-call` | 8 | 2.00x, 1 seed | 60 |"
    assert said[4].startswith("| `random` | 4, 2 | 4.00x (")
