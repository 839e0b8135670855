"""The `agentflow` command: its options, and what a user sees of an error."""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from configs.errors import UserError
from ray_jobs import commands
from ray_jobs.options import (
    DEFAULT_RECIPE,
    CommandParser,
    add_adapter,
    add_address,
    add_backend,
    add_compare_options,
    add_evaluation_options,
    add_export_options,
    add_plan_options,
    add_recipe,
    add_simulate_options,
    add_submit_options,
    add_view_options,
    seconds,
    whole_number,
)

DRY_RUN = "print the resolved configuration, make every check that is made before a start, and stop"

Adding: TypeAlias = "argparse._SubParsersAction[Any]"
"""Where commands are added to."""

MENDABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)
"""What the system refuses because of the place, and not because of a fault in this code."""

QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. What the user can mend is one line on stderr and code 2."""
    options = _parse(arguments)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        return int(options.run(options))
    except KeyboardInterrupt as interrupt:
        print(f"agentflow: interrupted{f'; {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        return 130
    except Exception as error:
        line = _for_the_user(error)
        if line is None:
            raise
        print(f"agentflow: error: {line}", file=sys.stderr)
        return 2


def _for_the_user(error: BaseException) -> str | None:
    """One line, for an error whose message says what to do; None for one whose traceback is needed."""
    # Ray wraps what an actor raised, and its own text is the actor's traceback.
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    # Python's own have a number and say nothing of what to do; ours are a sentence.
    missing_file = type(error) is FileNotFoundError and error.errno is None
    if missing_file or isinstance(error, UserError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in MENDABLE and error.filename is not None:
        return (
            f"cannot use '{error.filename}': {error.strerror}; see to its rights and free space, or name another place"
        )
    return None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand before or after options, which argparse alone does not allow."""
    parser = _parser()
    command, given = parser.command(sys.argv[1:] if arguments is None else arguments)
    options, rest = parser.parse_known_args(given)
    foreign = [text for text in rest if text.startswith("-") or "=" not in text]
    if foreign or (rest and (not hasattr(options, "overrides") or options.recipe is None)):
        command.refuse(foreign or rest)
    if rest:
        options.overrides = [*options.overrides, *rest]
    if "=" in str(getattr(options, "recipe", "")):
        # The recipe may be left out, and then the first override stands in its place.
        options.overrides = [str(options.recipe), *options.overrides]
        options.recipe = DEFAULT_RECIPE
    return options


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="agentflow",
        description="Asynchronous RL on Ray for the planner of a tool-using agent.",
        epilog="`agentflow help COMMAND` says more of one.",
    )
    parser.add_argument("--version", action="version", version=f"agentflow {version('agentflow-ray')}")
    adding = parser.add_subparsers(required=True, metavar="COMMAND")
    # The order is that of `agentflow --help`.
    _add_training(adding)
    _add_jobs(adding)
    _add_chaos(adding)
    _add_evaluation(adding)
    _add_prm(adding)
    _add_planning(adding)
    _add_policies(adding)
    _add_tools(adding)
    add_view_options(adding)
    _add_doctor(adding)
    parser.commands = adding.choices
    return parser


def _add_training(adding: Adding) -> None:
    train = adding.add_parser("train", help="train a planner as a recipe says, and report")
    add_recipe(train, positional=True)
    train.add_argument("--dry-run", action="store_true", help=DRY_RUN)
    train.set_defaults(run=commands.train, with_prm=False, resume=False)

    pipeline = adding.add_parser(
        "pipeline",
        help="collect, label, train a process reward model, then the planner with it; continues an unfinished run",
    )
    add_recipe(pipeline, positional=True)
    pipeline.add_argument("--dry-run", action="store_true", help=DRY_RUN)
    pipeline.set_defaults(run=commands.train, with_prm=True, resume=True)

    resume = adding.add_parser("resume", help="continue a run that was cut off, from its folder; nothing is lost")
    resume.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run, below runs/")
    resume.set_defaults(run=commands.resume)


def _add_jobs(adding: Adding) -> None:
    submit = adding.add_parser("submit", help="run a phase as a job on a Ray cluster, and see what becomes of it")
    add_recipe(submit, positional=True)
    add_submit_options(submit)
    submit.set_defaults(run=commands.submit)

    status = adding.add_parser("status", help="the jobs of a cluster, or one of them with the end of its log")
    status.add_argument("job", nargs="?", metavar="JOB", help="as `agentflow submit` named it")
    add_address(status)
    status.set_defaults(run=commands.status)

    logs = adding.add_parser("logs", help="the log of a job")
    logs.add_argument("job", metavar="JOB", help="as `agentflow submit` named it")
    logs.add_argument("--follow", action="store_true", help="go on until the job has ended")
    add_address(logs)
    logs.set_defaults(run=commands.logs)

    stop = adding.add_parser("stop", help="end a job; its run can be resumed")
    stop.add_argument("job", metavar="JOB", help="as `agentflow submit` named it")
    add_address(stop)
    stop.set_defaults(run=commands.stop)


def _add_chaos(adding: Adding) -> None:
    chaos = adding.add_parser("chaos", help="do random faults to a small job, and see whether it is sound")
    add_recipe(chaos, positional=True)
    chaos.add_argument("--faults", type=whole_number, default=20, help="how many faults (default 20)")
    chaos.add_argument("--seed", type=int, default=0, help="which faults happen, and when")
    chaos.add_argument(
        "--only", action="append", metavar="FAULT", help="only this one: kill-rollout, hang-learner, ..."
    )
    chaos.add_argument("--two-machines", action="store_true", help="on a cluster of two nodes, one of which may go")
    chaos.set_defaults(run=commands.chaos)


def _add_evaluation(adding: Adding) -> None:
    evaluate = adding.add_parser("evaluate", help="solve benchmarks or held-out tasks; goes on where it ended")
    add_recipe(evaluate, positional=True)
    add_adapter(evaluate)
    add_backend(evaluate)
    add_evaluation_options(evaluate)
    evaluate.set_defaults(run=commands.evaluate)

    compare = adding.add_parser("compare", help="two evaluations of the same items: paired, tested, and what it proves")
    add_compare_options(compare)
    compare.set_defaults(run=commands.compare)


def _add_prm(adding: Adding) -> None:
    collect = adding.add_parser("collect", help="collect trajectories of the base model or an adapter, to label")
    add_recipe(collect, positional=True)
    add_adapter(collect)
    collect.set_defaults(run=commands.collect)

    label = adding.add_parser("label", help="label the steps of the collected trajectories")
    add_recipe(label, positional=True)
    add_adapter(label)
    label.add_argument("--dry-run", action="store_true", help="print what it would take and cost, and stop")
    label.set_defaults(run=commands.label)

    train_prm = adding.add_parser("train-prm", help="train a process reward model on the labels, and measure it")
    add_recipe(train_prm, positional=True)
    train_prm.set_defaults(run=commands.train_prm)


def _add_planning(adding: Adding) -> None:
    plan = adding.add_parser("plan", help="whether a run fits its card: every GiB with its arithmetic")
    add_recipe(plan, positional=True)
    add_plan_options(plan)
    plan.set_defaults(run=commands.plan)

    simulate = adding.add_parser("simulate", help="choose D, S and the number of workers in virtual time")
    add_recipe(simulate, positional=True)
    add_simulate_options(simulate)
    simulate.set_defaults(run=commands.simulate)


def _add_policies(adding: Adding) -> None:
    solve = adding.add_parser("solve", help="solve one question and print the steps as they happen")
    solve.add_argument("question")
    add_recipe(solve, positional=False)
    add_adapter(solve)
    add_backend(solve)
    solve.add_argument("--trace", type=Path, metavar="FILE", help="append the trajectory, as training writes them")
    solve.set_defaults(run=commands.solve)

    export = adding.add_parser("export", help="a policy as a merged Hugging Face model, a GGUF file and a Modelfile")
    add_export_options(export)
    export.set_defaults(run=commands.export)

    serve = adding.add_parser("serve", help="make an export a model of a running Ollama, and try it")
    serve.add_argument("export", type=Path, metavar="EXPORT", help="folder that `agentflow export` wrote")
    serve.add_argument("--model", default="agentflow", help="its name there (default agentflow)")
    add_recipe(serve, positional=False)
    serve.set_defaults(run=commands.serve)


def _add_tools(adding: Adding) -> None:
    run_code = adding.add_parser("run-code", help="run a Python file in the sandbox")
    run_code.add_argument("file")
    run_code.add_argument("--timeout", type=seconds, default=5.0, help="seconds (default 5)")
    run_code.set_defaults(run=commands.run_code)

    serve_tools = adding.add_parser("serve-tools", help="serve a recipe's tools to any MCP client")
    add_recipe(serve_tools, positional=True)
    serve_tools.add_argument(
        "--transport", choices=("stdio", "http"), default="stdio", help="stdio (default) for one client, http for many"
    )
    serve_tools.add_argument("--host", default="127.0.0.1", help="address for http (default 127.0.0.1)")
    serve_tools.add_argument("--port", type=int, default=8765, help="port for http (default 8765; 0: any free one)")
    serve_tools.set_defaults(run=commands.serve_tools)


def _add_doctor(adding: Adding) -> None:
    doctor = adding.add_parser("doctor", help="what is installed, and what this machine can run")
    says = "prove a recipe's weight sync instead: its learner, its engine, every fault that must be caught"
    doctor.add_argument(
        "--sync", dest="recipe", nargs="?", type=Path, const=DEFAULT_RECIPE, metavar="RECIPE", help=says
    )
    doctor.set_defaults(run=commands.doctor, overrides=[])


if __name__ == "__main__":
    sys.exit(main())
