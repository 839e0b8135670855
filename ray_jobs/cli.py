"""The `agentflow` command: its options, and what a user sees of an error."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ray_jobs import commands
from ray_jobs.simulate_options import add_simulate_options

RECIPES = Path(__file__).parents[1] / "configs" / "recipes"
DEFAULT_RECIPE = RECIPES / "demo_cpu.toml"

# By name: importing the modules that define them would import torch and Ray.
USER_ERRORS = (
    "AdapterMismatchError",
    "AdapterStoreError",
    "BudgetExceededError",
    "ChatError",
    "LabellingStoppedError",
    "NothingCollectedError",
    "PrmError",
    "ConfigError",
    "PreflightError",
    "CheckpointError",
    "RunCutOffError",
    "RunFolderError",
    "SandboxRefusedError",
    "ChaosError",
    "CrashLoopError",
    "LedgerError",
    "NoRoomError",
    "StarvedError",
)

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
    except KeyboardInterrupt:
        print("agentflow: interrupted", file=sys.stderr)
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
    error = getattr(error, "cause", error)
    # Python's own have a number and say nothing of what to do; ours are a sentence.
    missing_file = type(error) is FileNotFoundError and error.errno is None
    return " ".join(str(error).split()) if missing_file or type(error).__name__ in USER_ERRORS else None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand before or after options, which argparse alone does not allow."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    foreign = [text for text in rest if text.startswith("-") or "=" not in text]
    if foreign or (rest and (not hasattr(options, "overrides") or options.recipe is None)):
        parser.error(f"unrecognized arguments: {' '.join(foreign or rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    if "=" in str(getattr(options, "recipe", "")):
        # The recipe may be left out, and then the first override stands in its place.
        options.overrides = [str(options.recipe), *options.overrides]
        options.recipe = DEFAULT_RECIPE
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentflow", description="Asynchronous RL on Ray for the planner of a tool-using agent."
    )
    adding = parser.add_subparsers(required=True, metavar="COMMAND")

    train = adding.add_parser("train", help="train a planner as a recipe says, and report")
    _add_recipe(train, positional=True)
    train.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    train.set_defaults(run=commands.train, with_prm=False, resume=False)

    pipeline = adding.add_parser(
        "pipeline",
        help="collect, label, train a process reward model, then the planner with it; continues an unfinished run",
    )
    _add_recipe(pipeline, positional=True)
    pipeline.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    pipeline.set_defaults(run=commands.train, with_prm=True, resume=True)

    resume = adding.add_parser("resume", help="continue a run that was cut off, from its folder; nothing is lost")
    resume.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run, below runs/")
    resume.set_defaults(run=commands.resume)

    chaos = adding.add_parser("chaos", help="run a small job, kill its parts at random, and see whether it is sound")
    _add_recipe(chaos, positional=True)
    chaos.add_argument("--kills", type=int, default=20, help="how many processes to kill (default 20)")
    chaos.add_argument("--seed", type=int, default=0, help="which parts are hit, and when")
    chaos.add_argument("--part", action="append", dest="parts", help="only this part: driver (with all), rollout, ...")
    chaos.set_defaults(run=commands.chaos)

    evaluate = adding.add_parser("evaluate", help="solve held-out tasks with the base model or an adapter")
    _add_recipe(evaluate, positional=True)
    _add_adapter(evaluate)
    evaluate.set_defaults(run=commands.evaluate)

    collect = adding.add_parser("collect", help="collect trajectories of the base model or an adapter, to label")
    _add_recipe(collect, positional=True)
    _add_adapter(collect)
    collect.set_defaults(run=commands.collect)

    label = adding.add_parser("label", help="label the steps of the collected trajectories")
    _add_recipe(label, positional=True)
    _add_adapter(label)
    label.add_argument("--dry-run", action="store_true", help="print what it would take and cost, and stop")
    label.set_defaults(run=commands.label)

    train_prm = adding.add_parser("train-prm", help="train a process reward model on the labels, and measure it")
    _add_recipe(train_prm, positional=True)
    train_prm.set_defaults(run=commands.train_prm)

    simulate = adding.add_parser("simulate", help="choose D, S and the number of workers in virtual time")
    _add_recipe(simulate, positional=True)
    add_simulate_options(simulate)
    simulate.set_defaults(run=commands.simulate)

    solve = adding.add_parser("solve", help="solve one question and print the steps as they happen")
    solve.add_argument("question")
    _add_recipe(solve, positional=False)
    _add_adapter(solve)
    solve.set_defaults(run=commands.solve)

    run_code = adding.add_parser("run-code", help="run a Python file in the sandbox")
    run_code.add_argument("file")
    run_code.add_argument("--timeout", type=float, default=5.0, help="seconds (default 5)")
    run_code.set_defaults(run=commands.run_code)

    doctor = adding.add_parser("doctor", help="what is installed, and what this machine can run")
    says = "prove a recipe's weight sync instead: its learner, its engine, every fault that must be caught"
    doctor.add_argument(
        "--sync", dest="recipe", nargs="?", type=Path, const=DEFAULT_RECIPE, metavar="RECIPE", help=says
    )
    doctor.set_defaults(run=commands.doctor, overrides=[])
    return parser


def _add_recipe(parser: argparse.ArgumentParser, *, positional: bool) -> None:
    if positional:
        parser.add_argument("recipe", nargs="?", type=Path, default=DEFAULT_RECIPE, help="TOML recipe")
    else:
        parser.add_argument("--recipe", type=Path, default=DEFAULT_RECIPE, help="TOML recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. learner.learning_rate=2e-6")


def _add_adapter(parser: argparse.ArgumentParser) -> None:
    says = "checkpoint folder of a run, or the adapter file in it; `none` (default) is the untouched base model"
    parser.add_argument("--adapter", type=_adapter, metavar="CHECKPOINT", help=says)


def _adapter(text: str) -> Path | None:
    if text == "none":
        return None
    path = Path(text).expanduser()
    return path.parent if path.is_file() else path


if __name__ == "__main__":
    sys.exit(main())
