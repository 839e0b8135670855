"""The options of the commands. Imports nothing heavy."""

import argparse
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from configs.errors import did_you_mean


class CommandParser(argparse.ArgumentParser):
    """`commands` are set once all of them are added."""

    commands: "Mapping[str, CommandParser]" = {}

    def command(self, arguments: Sequence[str]) -> "tuple[CommandParser, list[str]]":
        """The parser of the command that is named, and the arguments; `help COMMAND`, `help` and nothing at all ask for
        help. Ends the process at an unknown command."""
        given = list(arguments) or ["help"]
        if given[0] == "help":
            given = [*given[1:2], "--help"]
        name = given[0]
        if name not in self.commands and not name.startswith("-"):
            near = did_you_mean(name, self.commands)
            self._end(f"unknown command '{name}'; `agentflow help` lists them{near}")
        return self.commands.get(name, self), given

    def refuse(self, arguments: Sequence[str]) -> NoReturn:
        """Ends the process at arguments that nothing takes."""
        near = did_you_mean(arguments[0].partition("=")[0], self._option_string_actions)
        self._end(f"unrecognized arguments: {' '.join(arguments)}; `{self.prog} --help` says what there is{near}")

    def error(self, message: str) -> NoReturn:
        self._end(f"{message}; `{self.prog} --help` says what there is")

    def _end(self, message: str) -> NoReturn:
        self.exit(2, f"agentflow: error: {message}\n")


def whole_number(text: str) -> int:
    """The type of an option that counts something. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got '{text}'")
    return int(text)


def seconds(text: str) -> float:
    """The type of an option that is a time. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got '{text}'")
    return value


DEFAULT_RECIPE = Path(__file__).parents[1] / "configs" / "recipes" / "demo_cpu.toml"


def add_recipe(parser: argparse.ArgumentParser, *, positional: bool) -> None:
    if positional:
        parser.add_argument("recipe", nargs="?", type=Path, default=DEFAULT_RECIPE, help="TOML recipe")
    else:
        parser.add_argument("--recipe", type=Path, default=DEFAULT_RECIPE, help="TOML recipe")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="e.g. learner.learning_rate=2e-6")


def add_adapter(parser: argparse.ArgumentParser) -> None:
    says = "run folder (its newest checkpoint), a checkpoint, or its adapter file; `none` (default) is the base model"
    parser.add_argument("--adapter", metavar="RUN|CHECKPOINT", help=says)


def add_backend(parser: argparse.ArgumentParser) -> None:
    says = "vllm:FOLDER (a merged model), ollama:MODEL or openai:MODEL; backend.base_url=... says where it listens"
    parser.add_argument("--backend", metavar="KIND:MODEL", help=says)


def add_evaluation_options(parser: argparse.ArgumentParser) -> None:
    names = "bamboogle, 2wiki, hotpotqa, musique, gaia, aime24, amc23, game24, gpqa, medqa, or all; none: the recipe's"
    parser.add_argument(
        "--benchmark",
        type=_names,
        dest="benchmarks",
        default=(),
        metavar="NAME[,NAME]",
        help=f"{names} held-out tasks (evaluation.mix)",
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="local benchmark files; none downloads them")
    parser.add_argument("--part", action="store_true", help="take files that hold only a part of a benchmark")
    parser.add_argument("--seeds", type=whole_number, default=1, metavar="N", help="tries at every item (default 1)")
    parser.add_argument("--limit", type=whole_number, metavar="K", help="so many items of each benchmark")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the results; one that is begun goes on")


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="A", help="folder of an evaluation, or alone: of a training run")
    parser.add_argument("after", type=Path, nargs="?", metavar="B", help="folder of the evaluation to compare with it")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the comparison (default: inside of B)")
    parser.add_argument("--anyway", action="store_true", help="compare what differs in more than policy, and say so")


def _names(text: str) -> tuple[str, ...]:
    if text == "all":
        from envs.benchmarks.registry import BENCHMARKS

        return tuple(BENCHMARKS)
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


FORMATS = ("hf", "gguf")
QUANTIZATIONS = ("bf16", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def add_export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|CHECKPOINT", help="a run's newest checkpoint, a checkpoint, or `none`")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a folder that is not there yet")
    parser.add_argument("--format", type=_formats, default=FORMATS, metavar="hf,gguf", help="what to write (both)")
    parser.add_argument("--quantize", choices=QUANTIZATIONS, default="q8_0", help="of the GGUF file (default q8_0)")
    parser.add_argument(
        "--prompts", type=int, default=8, metavar="N", help="planner prompts that measure the quantisation (8; 0: none)"
    )
    parser.add_argument("--recipe", type=Path, help="settings of a checkpoint that lies in no run folder")


def _formats(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if not names or set(names) - set(FORMATS):
        raise argparse.ArgumentTypeError(f"'{text}' is none of hf, gguf and hf,gguf")
    return names


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--card", default="A40", metavar="NAME|GiB", help="A40 (default), L40S, A100, H100, H200, L4, ... or its GiB"
    )
    parser.add_argument(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="the policy's config.json; default: the model's folder, or known",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--run", dest="run_folder", type=Path, metavar="RUN_FOLDER", help="durations, shares and clocks of this run")
    option("--workers", type=_numbers, metavar="N,N", help="numbers of workers (default: the recipe's, and twice that)")
    option("--depth", type=_numbers, metavar="N,N", help="pipeline depths D (default: 0,1,2,4 and the recipe's)")
    option("--cap", type=_numbers, metavar="N,N", help="staleness caps S (default: the recipe's)")
    option("--steps", type=_positive, default=200, help="train steps (default 200)")
    option("--seed", type=int, default=0, help="seed of the drawn tasks, which all settings share (default 0)")
    option("--max-mean-staleness", type=float, default=2.0, metavar="X", help="bound for the best setting (default 2)")
    option("--max-masked", type=float, default=0.1, metavar="SHARE", help="bound for the best setting (default 0.1)")
    option("--places", type=_positive, help="groups at a time on a worker (default: what the recipe's engine takes)")
    option(
        "--load-slope",
        type=float,
        default=0.0,
        metavar="X",
        help="n groups on a worker each take 1 + (n - 1) X times as long (default 0)",
    )
    option("--step-s", type=float, metavar="S", help="seconds of a train step (default: the run's mean, or 20)")
    option(
        "--sync-s",
        type=float,
        metavar="S",
        help="seconds from new weights to sampling with them (default: the run's median, or 1)",
    )
    option("--median-s", type=float, metavar="S", help="without --run: median seconds of a group (default 30)")
    option("--sigma", type=float, help="without --run: lognormal seconds, deviation of their logarithm (default 1)")
    option("--alpha", type=float, help="without --run: Pareto seconds with this exponent instead")
    option("--signal", type=float, metavar="SHARE", help="without --run: groups to train on (default 0.6)")
    option("--all-right", type=float, metavar="SHARE", help="without --run: groups without a wrong answer (default 0)")
    option("--failed", type=float, metavar="SHARE", help="without --run: groups that fail for good (default 0)")
    option("--json", action="store_true", help="print everything as JSON")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of whole numbers such as 1,2,4") from None
    if numbers[0] < 0:
        raise argparse.ArgumentTypeError(f"'{text}' holds a negative number")
    return numbers


def _positive(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return number


PHASES = ("pipeline", "train", "resume", "collect", "label", "train-prm", "evaluate")
ACTING_PHASES = ("collect", "label", "train-prm", "evaluate")
"""They work in their own process, and start no actors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """`recipe` is a recipe, or for `resume` also the folder of a run. `runtime_env` is Ray's, to be added to ours."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    phase: str = "pipeline"
    address: str | None = None
    working_dir: Path = Path()
    follow: bool = False
    phase_options: tuple[str, ...] = ()
    runtime_env: Mapping[str, Any]


def add_submit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--phase", choices=PHASES, default="pipeline", help="what to run there (default pipeline)")
    parser.add_argument(
        "--working-dir", type=Path, default=Path(), metavar="FOLDER", help="what travels, without caches and runs (.)"
    )
    parser.add_argument("--follow", action="store_true", help="print the job's log until it has ended")
    parser.add_argument(
        "--options",
        type=_words,
        default=(),
        metavar="TEXT",
        help="further options of the phase's own command, e.g. --options='--benchmark gpqa --limit 20'",
    )
    parser.add_argument(
        "--runtime-env",
        type=_runtime_env,
        default={},
        metavar="FILE",
        help="YAML or JSON to add to the job's environment, as Ray takes it (pip, env_vars, excludes, ...)",
    )
    add_address(parser)


def add_address(parser: argparse.ArgumentParser) -> None:
    says = (
        "http://host:8265 (the dashboard) or host:port of a cluster; else RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or the"
    )
    parser.add_argument("--address", metavar="A", help=f"{says} cluster on this machine")


def submit_options(options: argparse.Namespace) -> SubmitOptions:
    return SubmitOptions(
        recipe=options.recipe,
        overrides=tuple(options.overrides),
        phase=options.phase,
        address=options.address,
        working_dir=options.working_dir,
        follow=options.follow,
        phase_options=options.options,
        runtime_env=options.runtime_env,
    )


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} in {text!r}") from error


def _runtime_env(text: str) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(Path(text).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict) or "working_dir" in found:
        raise argparse.ArgumentTypeError(f"{text} is no runtime environment without working_dir")
    return found


DEFAULT_PORT = 8770


def add_view_options(adding: "argparse._SubParsersAction[Any]") -> None:
    view = adding.add_parser("view", help="look at a run in the browser, also while it trains: every step, and why")
    view.add_argument("run_folders", nargs="+", type=Path, metavar="RUN", help="folder of a run; two are compared")
    says = f"port on 127.0.0.1 (default {DEFAULT_PORT}; 0: any free one)"
    view.add_argument("--port", type=int, default=DEFAULT_PORT, help=says)
    view.add_argument("--no-browser", dest="browser", action="store_false", help="only print the address")
    view.set_defaults(run=_view)


def _view(options: argparse.Namespace) -> int:
    from ray_jobs.viewer.server import run_view

    run_view(options.run_folders, port=options.port, browser=options.browser)
    return 0
