"""Evaluate one policy on benchmarks or held-out tasks, and report the results."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from configs.envs import EnvsConfig
from configs.errors import visible
from configs.rollout import PlannerAgentConfig
from configs.run import RunConfig
from envs.datasets.benchmarks import BENCHMARKS, load_benchmark, stem_of
from envs.datasets.families import FAMILIES
from envs.datasets.sampler import evaluation_tasks, never_trained_on
from envs.leakage import CONTAINMENT_LEAK, question_share
from envs.types import Task
from ray_jobs.evaluation_folder import (
    ITEMS,
    SUMMARY,
    EvaluationError,
    EvaluationFolder,
    Item,
    ItemKey,
    Record,
    StoredEvaluation,
    means_by_item,
    read_evaluation,
    why_unscored,
)
from ray_jobs.evaluation_identity import digest_of, fact_rows, identity_of, unproven
from ray_jobs.held_out import Attempts, Evaluator, Wanted
from ray_jobs.run.folder import write_json
from ray_jobs.run.local import open_worker
from ray_jobs.run.model_folder import resolve_model
from ray_jobs.run.origin import check_trained_alike, run_of, saved_config, started_in
from ray_jobs.run.preflight import check_key
from ray_jobs.statistics import wilson_interval
from ray_jobs.viewer.pages import Bar, percent, points, write_page
from reward.answer_judge import AnswerJudge
from rollout.filters import SOLVED
from rollout.records import read_records
from rollout.types import is_answer

Rates = dict[str, Any]
"""JSON values of `summary.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """The arguments of `agentflow evaluate`."""

    adapter: Path | None = None
    benchmarks: tuple[str, ...] = ()
    """Names of benchmarks. Without any, the held-out tasks of the recipe."""
    data: Path | None = None
    """Folder of the benchmark files."""
    whole: bool = True
    """Whether a file must hold all items of its benchmark."""
    num_seeds: int = 1
    limit: int | None = None
    """Largest number of items of each benchmark, the same ones in every evaluation."""
    out: Path | None = None


def run_evaluation(config: RunConfig, request: EvaluationRequest) -> Path:
    """Evaluate, or continue an unfinished evaluation, and return the report.

    Raises EvaluationError or UserError for a request that cannot be carried out.
    """
    if request.num_seeds > 1 and config.evaluation.temperature == 0:
        raise EvaluationError(
            f"--seeds {request.num_seeds} at evaluation.temperature = 0 would repeat one attempt; use one seed, or "
            "set evaluation.temperature=0.7"
        )
    if config.evaluation.judge:
        check_key("evaluation.judge.api_key_env", config.evaluation.judge.api_key_env)
    console = Console()
    tasks = evaluation_items(config, request)
    if beyond := beyond_search(config, request.benchmarks):
        console.print(
            f"{', '.join(beyond)}: envs.search = offline only finds the catalogue of generated tasks, and no tool of "
            "this recipe finds facts of the world; add wikipedia_search to envs.actions, or set envs.search=tavily"
        )
    model_path = resolve_model(config.model.path) if config.backend.type == "vllm" else None
    if request.adapter and model_path:
        check_trained_alike(request.adapter, config, model_path)
    identity = identity_of(
        config, adapter=request.adapter, model_path=model_path, tasks=tasks, num_seeds=request.num_seeds
    )
    out = request.out or Path(config.output_dir) / f"{config.name}-evaluation-{digest_of(identity)[:8]}"
    folder = EvaluationFolder(out, identity, benchmarks=request.benchmarks, seed=config.seed)
    wanted = [(task, seed) for seed in range(request.num_seeds) for task in tasks]
    missing = [(task, seed) for task, seed in wanted if ItemKey(task.dataset, task.id, seed) not in folder.done]
    if len(missing) < len(wanted):
        console.print(f"{len(wanted) - len(missing)} of {len(wanted)} results exist already")
    if missing:
        with console.status("loading the engine"), open_worker(config, request.adapter) as solver:
            _attempt_all(config, solver, missing, folder, console)
    return report_evaluation(out, console)


def evaluation_items(config: RunConfig, request: EvaluationRequest) -> list[Task]:
    """Return the items, benchmark by benchmark, without those of the training data. Raises EvaluationError."""
    console, items = Console(), list[Task]()
    groups: dict[str, list[Task]] = {}
    try:
        if request.benchmarks:
            groups = {name: load_benchmark(name, request.data, whole=request.whole) for name in request.benchmarks}
            trained = _trained_on(config, request.adapter)
        else:
            for task in evaluation_tasks(config):
                groups.setdefault(task.dataset, []).append(task)
            # The recipe's split keeps its own training tasks apart, and generated families ask new questions.
            only_generated = groups.keys() <= FAMILIES.keys()
            trained = [] if only_generated else [e for e in _trained_on(config, request.adapter) if e != config.envs]
        for name, tasks in groups.items():
            kept = tasks
            for envs in trained:
                kept = never_trained_on(kept, envs)
            if not kept:
                raise EvaluationError(
                    f"all {len(tasks)} items of '{name}' are training tasks; none is left to evaluate"
                )
            if len(kept) < len(tasks):
                left_out = len(tasks) - len(kept)
                console.print(f"{name}: {left_out} of {len(tasks)} items are training tasks and left out", markup=False)
            if request.limit is not None and request.limit < len(kept):
                kept = random.Random(f"limit|{name}").sample(kept, request.limit)
            items += kept
    except KeyError as error:
        raise EvaluationError(f"a row of a benchmark lacks the column {error}; use the original file") from error
    except (ValueError, OSError) as error:
        raise EvaluationError(str(error)) from error
    return items


def beyond_search(config: RunConfig, benchmarks: Sequence[str]) -> list[str]:
    """Return the benchmarks that ask for facts of the world although no tool of the recipe can find them.

    Custom tools and agents may find them.
    """
    envs = config.envs
    outside = {"wikipedia_search", "web_search", "google_search", *envs.tools}
    if envs.search != "offline":
        outside.add("search")
    if not isinstance(config.agent, PlannerAgentConfig) or outside & {*envs.actions}:
        return []
    return [name for name in benchmarks if BENCHMARKS[name].asks_facts]


def _trained_on(config: RunConfig, adapter: Path | None) -> list[EnvsConfig]:
    # The training data of the recipe, and those of the run that holds the adapter.
    run = run_of(adapter) if adapter else None
    if run is None:
        return [config.envs]
    envs = saved_config(run).envs
    if envs.data_path:
        data = started_in(run) / envs.data_path
        if not data.is_file():
            raise EvaluationError(
                f"envs.data_path of the run in '{run}' is missing: its training tasks in '{data}' cannot be left out; "
                "restore the file, or copy the checkpoint out of the run"
            )
        envs = envs.model_copy(update={"data_path": str(data)})
    return [config.envs, envs]


def _attempt_all(
    config: RunConfig, policy: Attempts, items: Sequence[tuple[Task, int]], folder: EvaluationFolder, console: Console
) -> None:
    settings = config.evaluation
    judge = AnswerJudge(settings.judge) if settings.judge else None
    evaluator = Evaluator(
        policy=policy,
        phase="evaluate",
        temperature=settings.temperature,
        judge=judge,
    )
    wanted = [
        Wanted(task=task, seed=seed, trajectory_id=f"{task.dataset}/{task.id}/{seed}", group_id=f"seed {seed}")
        for task, seed in items
    ]
    with Progress(console=console, transient=True) as progress:
        shown = progress.add_task("items", total=len(wanted))

        def keep(record: Record) -> None:
            folder.add(record)
            progress.advance(shown)

        asyncio.run(evaluator.evaluate(wanted, keep))
    for reason, count in judge.failures.most_common(3) if judge else ():
        console.print(f"{count} votes of the judge are missing: {visible(reason)}", markup=False, soft_wrap=True)


def report_evaluation(out: Path, console: Console) -> Path:
    """Write the summary and the page of a finished evaluation. Raises EvaluationError if no item is scored."""
    stored = read_evaluation(out)
    reason = why_unscored(stored.items)
    if not stored.solved:
        raise EvaluationError(
            f"none of the {len(stored.items)} items could be scored: {reason}; fix the cause and run the same command "
            "again, with another --out if the scorer changes"
        )
    summary = summarize_evaluation(stored)
    write_json(out / SUMMARY, summary)
    page = write_evaluation_page(out, stored, summary)
    rows = dict(summary["benchmarks"]) | ({"all": summary} if len(summary["benchmarks"]) > 1 else {})
    table = Table(title=f"Solved by {escape(visible(stored.name))}", title_justify="left")
    for column in ("benchmark", "solved", "items", "95% interval"):
        table.add_column(column)
    for name, row in rows.items():
        interval = "" if row["solve_rate"] is None else f"{points(row['solve_rate_ci95'])}%"
        table.add_row(Text(visible(name)), percent(row["solve_rate"]), str(row["num_scored"]), interval)
    console.print(table)
    if leaked := [name for row in summary["benchmarks"].values() for name in row["leaks"]["leaked"]]:
        console.print(
            f"[bold]leakage audit: {len(leaked)} of {len(stored.items)} results are leaked[/bold]: tools retrieved "
            f"most of the question, first {escape(visible(leaked[0]))}"
        )
    if unscored := stored.unscored:
        again = "; the same command repeats failed items" if summary["infrastructure_failures"] else ""
        console.print(
            f"[bold]{len(unscored)} of {len(stored.items)} results are unscored and in no rate[/bold]: "
            f"{escape(visible(reason))}{again}"
        )
    console.print(f"report: {page}", markup=False, soft_wrap=True)
    return page


def summarize_evaluation(stored: StoredEvaluation) -> Rates:
    """Return rates over all items and by benchmark.

    A rate is the mean over scored items of their mean over scored seeds. At least one item must be scored.
    """
    items = stored.items
    names = sorted({item.key.benchmark for item in items})
    benchmarks = {name: _results([item for item in items if item.key.benchmark == name]) for name in names}
    return {
        "policy": stored.identity["policy"],
        **_rate(items),
        "mean_over_benchmarks": mean(row["solve_rate"] for row in benchmarks.values() if row["solve_rate"] is not None),
        "num_items": sum(row["num_items"] for row in benchmarks.values()),
        "num_scored": sum(row["num_scored"] for row in benchmarks.values()),
        "num_seeds": stored.identity["seeds"],
        "infrastructure_failures": sum(item.broken for item in items),
        "undecided": sum(item.undecided for item in items),
        "unscored": list(map(str, stored.unscored)),
        "benchmarks": benchmarks,
        "frozen_calls": sum(item.frozen_calls for item in items),
        "foreign_calls": sum(item.foreign_calls for item in items),
        "planner_versions": sorted({version for item in items for version in item.planner_versions}),
        "unproven": unproven(stored.identity),
    }


def _results(items: Sequence[Item]) -> Rates:
    scored = [item for item in items if not item.unscored]
    seeds = sorted({item.key.seed for item in scored})
    rates = [mean(item.solved for item in scored if item.key.seed == seed) for seed in seeds]
    partial = [item.f1 for item in scored if item.f1 is not None]
    asked = [item for item in scored if item.judge_asked]
    leaked = [
        str(item.key) for item in items if question_share(stem_of(item.question), item.retrieved) >= CONTAINMENT_LEAK
    ]
    return {
        "num_items": len({item.key.task_id for item in items}),
        "num_scored": len({item.key.task_id for item in scored}),
        "num_results": len(items),
        **_rate(items),
        "by_seed": rates,
        "spread_over_seeds": stdev(rates) if len(rates) > 1 else None,
        "f1": mean(partial) if partial else None,
        "infrastructure_failures": sum(item.broken for item in items),
        "undecided": sum(item.undecided for item in items),
        "retried": sum(item.attempts > 1 for item in items),
        "endings": dict(Counter(item.stop_reason for item in items)),
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


def _rate(items: Iterable[Item]) -> Rates:
    # The interval is over items: further seeds of an item say nothing about other items.
    means = list(means_by_item(items).values())
    return {"solve_rate": mean(means) if means else None, "solve_rate_ci95": wilson_interval(sum(means), len(means))}


def write_evaluation_page(out: Path, stored: StoredEvaluation, summary: Rates) -> Path:
    """Write `report.html` into the folder of an evaluation. Raises OSError."""
    policy, rows = stored.identity["policy"], summary["benchmarks"]
    # Tasks of another source may have the name of a benchmark.
    known = {name: BENCHMARKS[name] for name in stored.benchmarks if name in BENCHMARKS}
    title_of = {name: known[name].title if name in known else name for name in rows}.__getitem__
    bars = []
    for name, row in rows.items():
        count, all_items = row["num_scored"], f" of {known[name].count}" if name in known else ""
        if count:
            note, rate, interval = f"{count}{all_items} items", row["solve_rate"], row["solve_rate_ci95"]
            bars.append(Bar(label=title_of(name), note=note, rate=rate, interval=interval, kind="after"))
    examples: dict[str, Mapping[str, object]] = {}
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
        facts=list(fact_rows(title_of, stored.identity)),
        examples=dict(sorted(examples.items())),
        provenance=stored.provenance,
        title_of=title_of,
    )
