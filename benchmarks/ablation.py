"""Step scores that guide attempts or are the credit, against outcomes alone, over seeds.

    python -m benchmarks.ablation [--recipe depth_cpu] [--seeds 0,1] [--arms outcome,plan]

The arms of a seed continue from one cold start and are evaluated on the same held-out tasks. Every arm but `twice`
makes the same number of train steps. The families have equal shares.

    outcome   outcomes alone
    twice     the same, with twice as many train steps; for `long`
    plan      `outcome_guided` with the best scores that a PRM can learn
    prm       `outcome_guided` with the PRM that the run trains
    judge     the same, with labels of a scripted judge (`benchmarks.pages.grade`); for `pages` and `long`
    random, lenient, padding
              `outcome_guided` with scores that mislead (see `benchmarks.scorers`)

    demo_cpu   the demo, with three lookups and with differences as a family of their own
    depth_cpu  a deep cold start, most of whose first attempts at three lookups and chains are wrong
    pages      an agent of openai-agents, few of whose first attempts are right; its PRM learns Monte Carlo labels
    long       the same agent, which answers tasks of one call and gives up at tasks of six, without those of three
    langgraph as `long`, with an agent of langgraph

End points, fixed beforehand: the greedy solve rate of each family after RL, and for each family the sampled tokens of
all families until half of its attempts while sampling are right, at three train steps in a row (`solved/FAMILY`, the
last 64 attempts at new tasks).

Each finished run appends a row to `--rows`, and the table of all rows is printed. Runs with a row are not repeated; in
`measured/ablation.jsonl` rows of earlier builds have arms of their own. The arms need the cold start of `outcome`,
which therefore comes first.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.pages import grade
from benchmarks.runs import train, train_steps
from benchmarks.scorers import SCORERS
from configs.loading import RECIPES
from ray_jobs.evaluation import evaluation_in
from ray_jobs.prm import CollectedGroups
from reward.labels import read_labels
from tests.reward.chat_server import Answer, FakeChatServer, says

ARMS = {
    "outcome": 'type="outcome"',
    "twice": 'type="outcome"',
    **{scorer: f'type="outcome_guided", turn_scorer="benchmarks.scorers:{scorer}"' for scorer in SCORERS},
    "prm": 'type="outcome_guided"',
    "judge": 'type="outcome_guided"',
}
BASE = "outcome"
COMMON = ("evaluation.num_tasks=80", "evaluation.num_untouched_tasks=0", "evaluation.every_steps=0")
HERE = Path(__file__).parent
OVERRIDES = {
    "demo_cpu": ("envs.mix={lookup=1, two_lookup=1, difference=1, three_lookup=1}", "num_steps=16"),
    "depth_cpu": (
        "envs.mix={lookup=1, two_lookup=1, three_lookup=1, chain=1}",
        "cold_start.lazy_share=0.9",
        "max_empty_batches=300",
    ),
    "pages": (),
    "long": ("envs.mix={one=1, six=1}", "num_steps=12", "max_empty_batches=60", "evaluation.num_tasks=40"),
}
OVERRIDES["langgraph"] = (*OVERRIDES["long"], 'agent.function="benchmarks.pages_langgraph:solve"')
HALF, IN_A_ROW = 0.5, 3
JUDGE_PORT = 23000
"""The port of the scripted judge, plus the seed: a resumed run calls the same one again."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), help="folder of all runs")
    parser.add_argument("--recipe", choices=OVERRIDES, default="demo_cpu")
    parser.add_argument("--seeds", default="0,1,2,3,4,5,6,7")
    parser.add_argument("--arms", default="outcome,plan,prm", help=", ".join(ARMS))
    parser.add_argument("--rows", type=Path, help="such as measured/ablation.jsonl (default: in --out)")
    options = parser.parse_args()
    rows = options.rows or options.out / "rows.jsonl"
    recipe = (
        HERE / "pages.toml" if options.recipe in ("pages", "long", "langgraph") else RECIPES / f"{options.recipe}.toml"
    )
    common = (*COMMON, *OVERRIDES[options.recipe])
    runs = [(seed, arm) for seed in map(int, options.seeds.split(",")) for arm in options.arms.split(",")]
    for seed, arm in runs:
        if (options.recipe, seed, arm) in {(row["recipe"], row["seed"], row["arm"]) for row in read(rows)}:
            continue
        base, folder = (options.out / f"{options.recipe}-{seed}-{name}" for name in (BASE, arm))
        overrides = (f"seed={seed}", f"reward.credit={{{ARMS[arm]}}}", *common)
        overrides += ("num_steps=24",) if arm == "twice" else ()
        with FakeChatServer(graded, port=JUDGE_PORT + seed) if arm == "judge" else nullcontext() as judge:
            if judge:
                overrides += (
                    f'label={{type="judge", judge={{model="scripted", base_url="{judge.url}", num_votes=1}}}}',
                )
            train(recipe, folder, overrides, start_from=None if arm == BASE else base)
        with rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"recipe": options.recipe, "seed": seed, "arm": arm, **row_of(folder)}) + "\n")
    print(table(read(rows)))


def graded(request: Mapping[str, Any]) -> Answer:
    return says(json.dumps({"score": grade(request["messages"][-1]["content"])}))


def read(rows: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()] if rows.exists() else []


def row_of(folder: Path) -> dict[str, Any]:
    """Return the results of a finished run; `tokens` are those of RL, `prm_tokens` those that the PRM learned from."""
    held_out: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for item in evaluation_in(folder, "eval_after").items:
        held_out[item.dataset][0] += item.solved
        held_out[item.dataset][1] += 1
    tokens, to_half, steps = 0.0, {}, train_steps(folder)
    phases = json.loads((folder / "phases.json").read_text())
    for number, step in enumerate(steps):
        tokens += step.get("rollout/sampled_tokens", 0.0) * step["rollout/trajectories"]
        tokens += step.get("guided/sampled_tokens", 0.0)
        for family in held_out.keys() - to_half.keys():
            rates = [one.get(f"solved/{family}", 0.0) for one in steps[: number + 1]]
            if len(rates) >= IN_A_ROW and min(rates[-IN_A_ROW:]) >= HALF:
                to_half[family] = round(tokens)
    return {
        "held_out": held_out,
        "tokens_to_half": to_half,
        "tokens": round(tokens),
        "prm_tokens": prm_tokens(folder),
        "attempts": round(sum(step["rollout/trajectories"] for step in steps)),
        "step_s": round(statistics.median(step["time/step_s"] for step in steps), 1),
        "phases_s": {name: round(phase["seconds"]) for name, phase in phases.items() if "seconds" in phase},
    }


def prm_tokens(folder: Path) -> int:
    """Return the tokens sampled for a PRM: of collected attempts, of the search, and of Monte Carlo labels."""
    if not (folder / "collected").exists():
        return 0
    turns = [turn for one in CollectedGroups(folder / "collected").trajectories() for turn in one.turns]
    labels, phases = read_labels(folder / "labels.jsonl"), json.loads((folder / "phases.json").read_text())
    tokens = sum(turn.num_tokens for turn in turns) + phases.get("deepen", {"facts": {}})["facts"].get("num_tokens", 0)
    return tokens + sum(int(str(label.details.get("num_tokens", 0))) for label in labels)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line per recipe and arm.

    The ratio is the geometric mean over the seeds and families in which this arm and `outcome` get to half.
    """
    lines = ["| recipe | arm | seeds | held out, by family | tokens to half, times fewer than outcome |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for recipe, arm in sorted({(row["recipe"], row["arm"]) for row in rows}):
        own = {row["seed"]: row for row in rows if (row["recipe"], row["arm"]) == (recipe, arm)}
        base = {row["seed"]: row["tokens_to_half"] for row in rows if (row["recipe"], row["arm"]) == (recipe, BASE)}
        found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for family, (solved, num) in (item for row in own.values() for item in row["held_out"].items()):
            found[family] = [found[family][0] + solved, found[family][1] + num]
        logs = [
            math.log(base[seed][family] / tokens)
            for seed, row in own.items()
            for family, tokens in row["tokens_to_half"].items()
            if family in base.get(seed, {})
        ]
        ratio = f"{math.exp(statistics.mean(logs)):.2f} ({len(logs)} pairs)" if logs else ""
        shown = ", ".join(f"{family} {solved} of {num}" for family, (solved, num) in sorted(found.items()))
        lines.append(f"| {recipe} | {arm} | {len(own)} | {shown} | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
