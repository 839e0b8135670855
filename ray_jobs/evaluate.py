"""Evaluate one policy on benchmarks or held-out tasks, and report the results."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from configs.envs import EnvsConfig
from configs.errors import UserError, printable, reason
from configs.run import RunConfig
from envs.datasets.benchmarks import BENCHMARKS, load_benchmark, stem_of
from envs.datasets.families import FAMILIES
from envs.datasets.sampler import evaluation_tasks, never_trained_on
from envs.leakage import CONTAINMENT_LEAK, question_share
from envs.tools.closing import until_closed
from envs.types import Task
from ray_jobs.evaluation import (
    ITEMS,
    Item,
    StoredEvaluation,
    digest_of,
    fact_rows,
    identity_of,
    means_by_item,
    open_folder,
    read_evaluation,
    title_of,
    why_unscored,
)
from ray_jobs.held_out import Wanted, attempt_all
from ray_jobs.run.folder import write_json
from ray_jobs.run.local import open_worker
from ray_jobs.run.model_folder import resolve_model
from ray_jobs.run.origin import check_trained_alike, run_of, saved_config, started_in, with_absolute_paths
from ray_jobs.run.preflight import check_key
from ray_jobs.statistics import wilson_interval
from ray_jobs.viewer.pages import Rate, percent, points, write_page
from reward.judge_client import AnswerJudge
from rollout.codec import Record
from rollout.files import append_record, read_records
from rollout.filters import SOLVED
from rollout.types import Trajectory, is_answer

Rates = dict[str, Any]
"""JSON values of `summary.json`."""


def run_evaluation(
    config: RunConfig, tasks: Sequence[Task], *, adapter: Path | None, num_seeds: int, out: Path | None
) -> Path:
    """Evaluate, or continue an unfinished evaluation in the folder `out`, and return the report. Raises UserError."""
    console = Console()
    model_path = resolve_model(config.model.path) if config.backend.type == "vllm" else None
    if adapter and model_path:
        check_trained_alike(adapter, config, model_path)
    identity = identity_of(config, adapter=adapter, model_path=model_path, tasks=tasks, num_seeds=num_seeds)
    digest = digest_of([identity.policy, identity.fixed])[:8]
    folder = out or Path(config.output_dir) / f"{config.name}-evaluation-{digest}"
    done = open_folder(folder, identity)
    every = [(task, seed, f"{task.dataset}/{task.id}/{seed}") for seed in range(num_seeds) for task in tasks]
    missing = [wanted for wanted in every if wanted[2] not in done]
    if len(missing) < len(every):
        console.print(f"{len(every) - len(missing)} of {len(every)} results exist already")
    if missing:
        _attempt_missing(config, adapter, missing, folder, console)
    return report_evaluation(folder, console)


def _attempt_missing(
    config: RunConfig, adapter: Path | None, missing: Sequence[Wanted], out: Path, console: Console
) -> None:
    settings = config.evaluation
    judge = AnswerJudge(settings.judge) if settings.judge else None
    with (
        console.status("loading the engine"),
        open_worker(config, adapter) as solver,
        Progress(console=console, transient=True) as progress,
    ):
        shown = progress.add_task("items", total=len(missing))

        def keep(_: Trajectory, record: Record) -> None:
            append_record(out / ITEMS, record)
            progress.advance(shown)

        temperature = settings.temperature
        work = attempt_all(solver, missing, keep, phase="evaluate", temperature=temperature, judge=judge)
        asyncio.run(until_closed(work))
    for failure, count in judge.failures.most_common(3) if judge else ():
        console.print(f"{count} votes of the judge are missing: {printable(failure)}", markup=False, soft_wrap=True)


def check_evaluation(config: RunConfig, *, num_seeds: int) -> None:
    """Make the checks of an evaluation that need no items. Raises UserError."""
    settings = config.evaluation
    if num_seeds > 1 and settings.temperature == 0:
        raise UserError(
            f"--seeds {num_seeds} at evaluation.temperature = 0 would repeat one attempt; use one seed, or set "
            "evaluation.temperature=0.7"
        )
    if settings.judge:
        check_key("evaluation.judge.api_key_env", settings.judge.api_key_env)


def evaluation_items(
    config: RunConfig,
    *,
    adapter: Path | None = None,
    benchmarks: Sequence[str] = (),
    data: Path | None = None,
    whole: bool = True,
    limit: int | None = None,
) -> list[Task]:
    """Return the items, benchmark by benchmark, without those of the training data. Raises UserError.

    Without `benchmarks` they are the held-out tasks of the recipe. `data` is the folder of the benchmark files, which
    are else downloaded, and `limit` the largest number of items of each, the same ones in every evaluation. The run
    that holds `adapter` may have trained on other tasks.
    """
    items, groups, trained = list[Task](), defaultdict[str, list[Task]](list), list[EnvsConfig]()
    try:
        if benchmarks:
            groups |= {name: load_benchmark(name, data, whole=whole) for name in benchmarks}
            trained = [config.envs, *_trained_on(adapter)]
        else:
            for task in evaluation_tasks(config):
                groups[task.dataset].append(task)
            # The recipe's split keeps its own training tasks apart, and generated families ask new questions.
            if groups.keys() - FAMILIES.keys():
                trained = [envs for envs in _trained_on(adapter) if envs != config.envs]
        for name, tasks in groups.items():
            kept = tasks
            for envs in trained:
                kept = never_trained_on(kept, envs)
            if len(kept) < len(tasks):
                note = f"{name}: {len(tasks) - len(kept)} of {len(tasks)} items are training tasks and left out"
                Console().print(note, markup=False)
            if limit is not None and limit < len(kept):
                kept = random.Random(f"limit|{name}").sample(kept, limit)
            items += kept
    except (KeyError, ValueError, OSError) as error:
        raise UserError(f"the items cannot be read: {reason(error)}; use the benchmark's original file") from error
    if not items:
        raise UserError("all items are training tasks; none is left to evaluate")
    return items


def _trained_on(adapter: Path | None) -> list[EnvsConfig]:
    """Return the tasks of the run that holds the adapter."""
    run = run_of(adapter) if adapter else None
    if run is None:
        return []
    envs = with_absolute_paths(saved_config(run), started_in(run)).envs
    for name, own in envs.datasets.items():
        if own.is_file and not Path(own.source).is_file():
            raise UserError(
                f"envs.datasets.{name}.source of the run in '{run}' is missing: its training tasks in '{own.source}' "
                "cannot be left out; restore the file, or copy the checkpoint out of the run"
            )
    return [envs]


def report_evaluation(out: Path, console: Console) -> Path:
    """Write the summary and the page of a finished evaluation. Raises UserError if no item is scored."""
    stored = read_evaluation(out)
    why = why_unscored(stored.items)
    if not stored.solved:
        raise UserError(
            f"none of the {len(stored.items)} items could be scored: {why}; fix the cause and run the same command "
            "again, with another --out if the scorer changes"
        )
    summary = summarize_evaluation(stored)
    write_json(out / "summary.json", summary)
    page = write_evaluation_page(out, stored, summary)
    rows = summary["benchmarks"] | ({"all": summary} if len(summary["benchmarks"]) > 1 else {})
    title = f"Solved by {escape(printable(stored.name))}"
    table = Table("benchmark", "solved", "items", "95% interval", title=title, title_justify="left")
    for name, row in rows.items():
        interval = "" if row["solve_rate"] is None else f"{points(row['solve_rate_ci95'])}%"
        table.add_row(Text(printable(name)), percent(row["solve_rate"]), str(row["num_scored"]), interval)
    console.print(table)
    if leaked := [name for row in summary["benchmarks"].values() for name in row["leaks"]["leaked"]]:
        console.print(f"{len(leaked)} results are leaked: a tool retrieved most of the question", style="bold")
    if unscored := stored.unscored:
        note = f"{len(unscored)} results are unscored: {printable(why)}; the same command repeats failed items"
        console.print(note, style="bold", markup=False, soft_wrap=True)
    console.print(f"report: {page}", markup=False, soft_wrap=True)
    return page


def summarize_evaluation(stored: StoredEvaluation) -> Rates:
    """Return rates over all items and by benchmark.

    A rate is the mean over scored items of their mean over scored seeds. At least one item must be scored.
    """
    items = stored.items
    names = sorted({item.dataset for item in items})
    benchmarks = {name: _results([item for item in items if item.dataset == name]) for name in names}
    rates = [row["solve_rate"] for row in benchmarks.values() if row["solve_rate"] is not None]
    return {
        "policy": stored.identity.policy,
        **_rate(items),
        "mean_over_benchmarks": mean(rates),
        "num_seeds": stored.identity.fixed["seeds"],
        "infrastructure_failures": sum(item.broken for item in items),
        "unscored": stored.unscored,
        "benchmarks": benchmarks,
    }


def _results(items: Sequence[Item]) -> Rates:
    scored = [item for item in items if not item.unscored]
    seeds = sorted({item.seed for item in scored})
    rates = [mean(item.solved for item in scored if item.seed == seed) for seed in seeds]
    partial = [item.f1 for item in scored if item.f1 is not None]
    asked = [item for item in scored if item.judge_asked]
    leaked = [item.key for item in items if question_share(stem_of(item.question), item.retrieved) >= CONTAINMENT_LEAK]
    return {
        **_rate(items),
        "num_unscored": len(items) - len(scored),
        "by_seed": rates,
        "spread_over_seeds": stdev(rates) if len(rates) > 1 else None,
        "f1": mean(partial) if partial else None,
        "no_answer": sum(not is_answer(item.answer) for item in scored),
        "turns": mean(item.num_turns for item in items),
        "judge": {
            "asked": len(asked),
            "accepted": sum(item.judged is True for item in asked),
            "silent": sum(item.judged is None for item in asked),
            "solve_rate_with_judge": mean(means_by_item(scored, with_judge=True).values()),
        }
        if asked
        else None,
        "leaks": {
            "searched": sum(any(map(str.strip, item.retrieved)) for item in items),
            "leaked": leaked,
            "share": len(leaked) / len(items),
        },
    }


def _rate(items: Sequence[Item]) -> Rates:
    """Return the rate with its interval over items: further seeds of an item say nothing about other items."""
    means = list(means_by_item(items).values())
    return {
        "num_items": len({item.place for item in items}),
        "num_scored": len(means),
        "solve_rate": mean(means) if means else None,
        "solve_rate_ci95": wilson_interval(sum(means), len(means)),
    }


def write_evaluation_page(out: Path, stored: StoredEvaluation, summary: Rates) -> Path:
    """Write `report.html` into the folder of an evaluation. Raises OSError."""
    policy, examples = stored.identity.policy, dict[str, Record]()
    bars = []
    for name, row in summary["benchmarks"].items():
        if count := row["num_scored"]:
            note = f"{count}{f' of {BENCHMARKS[name].count}' if name in BENCHMARKS else ''} items"
            rate, interval = row["solve_rate"], row["solve_rate_ci95"]
            bars.append(Rate(label=title_of(name), note=note, rate=rate, interval=interval, kind="after"))
    for record in read_records(out / ITEMS):
        if record["reward"] is not None:
            examples.setdefault("A solved item" if record["reward"] == SOLVED else "An unsolved item", record)
    return write_page(
        out / "report.html",
        "evaluation",
        folder=out.name,
        policy=stored.name,
        untouched=policy["backend"] == "vllm" and policy["adapter"] is None,
        summary=summary,
        why_unscored=why_unscored(stored.items),
        bars=bars,
        facts=list(fact_rows(stored.identity)),
        examples=dict(sorted(examples.items())),
        provenance=stored.identity.provenance,
        title_of=title_of,
    )
