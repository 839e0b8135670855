"""The `agentflow` command. Heavy imports happen inside the commands, so that help and dry runs are instant."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ray_jobs.simulate_options import add_simulate_options

if TYPE_CHECKING:
    from configs.run import RunConfig

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


def _config(options: argparse.Namespace) -> "RunConfig":
    from configs.loading import load_run_config

    return load_run_config(options.recipe, options.overrides)


def _checked_config(options: argparse.Namespace, *, draws_tasks: bool) -> "RunConfig":
    """For the commands that only act."""
    config = _config(options)
    from ray_jobs.preflight import check_before_acting

    check_before_acting(config, draws_tasks=draws_tasks)
    return config


def _train(options: argparse.Namespace) -> int:
    config = _config(options)
    if options.dry_run:
        from configs.loading import render_config

        print(render_config(config), end="")
        return 0
    from ray_jobs.train import run_training

    run_training(config, with_prm=options.with_prm, resume=options.resume)
    return 0


def _resume(options: argparse.Namespace) -> int:
    from ray_jobs.run_folder import begun_run

    config, with_prm = begun_run(options.run_folder)
    from ray_jobs.train import run_training

    run_training(config, with_prm=with_prm, resume=True)
    return 0


def _chaos(options: argparse.Namespace) -> int:
    config = _config(options)
    from ray_jobs.chaos import run_chaos

    job = "train" if config.reward.credit == "outcome" else "pipeline"
    start = [sys.executable, "-m", "ray_jobs.cli", job, str(options.recipe), *options.overrides]
    return run_chaos(config, start, kills=options.kills, seed=options.seed)


def _evaluate(options: argparse.Namespace) -> int:
    config = _checked_config(options, draws_tasks=True)
    from ray_jobs.evaluate import run_evaluation

    run_evaluation(config, options.adapter)
    return 0


def _solve(options: argparse.Namespace) -> int:
    config = _checked_config(options, draws_tasks=False)
    from ray_jobs.solve import run_solve

    run_solve(config, options.question, options.adapter)
    return 0


def _collect(options: argparse.Namespace) -> int:
    config = _checked_config(options, draws_tasks=True)
    from ray_jobs.collect import run_collect

    run_collect(config, options.adapter)
    return 0


def _label(options: argparse.Namespace) -> int:
    config = _config(options)
    from ray_jobs.label import run_label

    run_label(config, options.adapter, dry_run=options.dry_run)
    return 0


def _train_prm(options: argparse.Namespace) -> int:
    config = _config(options)
    from ray_jobs.train_prm import run_train_prm

    run_train_prm(config)
    return 0


def _run_code(options: argparse.Namespace) -> int:
    from ray_jobs.run_code import main as run_code

    return run_code(options.file, options.timeout)


def _doctor(options: argparse.Namespace) -> int:
    if options.recipe is not None:
        config = _checked_config(options, draws_tasks=False)
        from ray_jobs.sync_doctor import run_sync_doctor

        return run_sync_doctor(config)
    from ray_jobs.doctor import run_doctor

    return run_doctor()


def _simulate(options: argparse.Namespace) -> int:
    config = _config(options)
    from ray_jobs.simulate import run_simulate

    run_simulate(config, options)
    return 0


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
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a planner as a recipe says, and report")
    _add_recipe(train, positional=True)
    train.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    train.set_defaults(run=_train, with_prm=False, resume=False)

    pipeline = commands.add_parser(
        "pipeline",
        help="collect, label, train a process reward model, then the planner with it; continues an unfinished run",
    )
    _add_recipe(pipeline, positional=True)
    pipeline.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    pipeline.set_defaults(run=_train, with_prm=True, resume=True)

    resume = commands.add_parser("resume", help="continue a run that was cut off, from its folder; nothing is lost")
    resume.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run, below runs/")
    resume.set_defaults(run=_resume)

    chaos = commands.add_parser("chaos", help="run a small job, kill its parts at random, and see whether it is sound")
    _add_recipe(chaos, positional=True)
    chaos.add_argument("--kills", type=int, default=20, help="how many processes to kill (default 20)")
    chaos.add_argument("--seed", type=int, default=0, help="which parts are hit, and when")
    chaos.set_defaults(run=_chaos)

    evaluate = commands.add_parser("evaluate", help="solve held-out tasks with the base model or an adapter")
    _add_recipe(evaluate, positional=True)
    _add_adapter(evaluate)
    evaluate.set_defaults(run=_evaluate)

    collect = commands.add_parser("collect", help="collect trajectories of the base model or an adapter, to label")
    _add_recipe(collect, positional=True)
    _add_adapter(collect)
    collect.set_defaults(run=_collect)

    label = commands.add_parser("label", help="label the steps of the collected trajectories")
    _add_recipe(label, positional=True)
    _add_adapter(label)
    label.add_argument("--dry-run", action="store_true", help="print what it would take and cost, and stop")
    label.set_defaults(run=_label)

    train_prm = commands.add_parser("train-prm", help="train a process reward model on the labels, and measure it")
    _add_recipe(train_prm, positional=True)
    train_prm.set_defaults(run=_train_prm)

    simulate = commands.add_parser("simulate", help="choose D, S and the number of workers in virtual time")
    _add_recipe(simulate, positional=True)
    add_simulate_options(simulate)
    simulate.set_defaults(run=_simulate)

    solve = commands.add_parser("solve", help="solve one question and print the steps as they happen")
    solve.add_argument("question")
    _add_recipe(solve, positional=False)
    _add_adapter(solve)
    solve.set_defaults(run=_solve)

    run_code = commands.add_parser("run-code", help="run a Python file in the sandbox")
    run_code.add_argument("file")
    run_code.add_argument("--timeout", type=float, default=5.0, help="seconds (default 5)")
    run_code.set_defaults(run=_run_code)

    doctor = commands.add_parser("doctor", help="what is installed, and what this machine can run")
    says = "prove a recipe's weight sync instead: its learner, its engine, every fault that must be caught"
    doctor.add_argument(
        "--sync", dest="recipe", nargs="?", type=Path, const=DEFAULT_RECIPE, metavar="RECIPE", help=says
    )
    doctor.set_defaults(run=_doctor, overrides=[])
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
