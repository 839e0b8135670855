"""The `agentflow` command: its subcommands, their options, and how errors are shown.

Modules that take long to import are imported inside the commands.
"""

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, CycloptsError, Parameter, Token
from cyclopts.validators import Number

from configs.errors import UserError, printable, user_error

if TYPE_CHECKING:
    from configs.run import RunConfig

QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def _checkpoint(_: object, tokens: Sequence[Token]) -> Path | None:
    if tokens[-1].value == "none":
        return None
    from ray_jobs.run.origin import checkpoint_at

    return checkpoint_at(Path(tokens[-1].value).expanduser())


def _names(_: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    from envs.datasets.benchmarks import BENCHMARKS

    names = BENCHMARKS if tokens[-1].value == "all" else tokens[-1].value.split(",")
    return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))


Phase = Literal["train", "resume", "train-prm", "evaluate"]
Quantization = Literal["bf16", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
Given = Annotated[
    str,
    Parameter(
        name="RECIPE key=value",
        help="TOML file or name of a built-in recipe (default: ./recipe.toml, else demo_cpu), and settings: seed=1",
    ),
]
Count = Annotated[int, Parameter(validator=Number(gte=1))]
RunFolder = Annotated[Path, Parameter(name="RUN", help="folder of a run, below runs/")]
Adapter = Annotated[
    Path | None,
    Parameter(
        converter=_checkpoint,
        metavar="RUN|CHECKPOINT",
        help="run folder (its newest checkpoint), a checkpoint, or its adapter file; `none` is the base model",
    ),
]
Backend = Annotated[
    str | None,
    Parameter(
        metavar="KIND:MODEL",
        help="vllm:FOLDER (a merged model), ollama:MODEL or openai:MODEL; backend.base_url=... is the server's address",
    ),
]
Folder = Annotated[Path | None, Parameter(metavar="FOLDER")]
File = Annotated[Path | None, Parameter(metavar="FILE")]
Benchmarks = Annotated[
    tuple[str, ...],
    Parameter(
        converter=_names,
        metavar="NAME[,NAME]",
        help="bamboogle, 2wiki, hotpotqa, musique, gaia, aime24, amc23, game24, gpqa, medqa, or all; without it the "
        "recipe's held-out tasks (evaluation.mix)",
    ),
]


def run_config(given: Sequence[str], *, backend: str | None = None) -> "RunConfig":
    """Load and validate the configuration; `backend` is KIND:MODEL."""
    from configs.loading import load_run_config, split_arguments
    from envs.tools.function_tool import with_server_tools

    path, changes = split_arguments(given)
    kind, _, model = (backend or "").partition(":")
    if kind:
        changes += (f"backend.type={json.dumps(kind)}",)
    if model:
        changes += (f"{'model.path' if kind == 'vllm' else 'backend.model'}={json.dumps(model)}",)
    config = load_run_config(path, changes)
    return config.model_copy(update={"envs": with_server_tools(config.envs, run=config.run_path)})


def acting_config(given: Sequence[str], *, backend: str | None = None, draws_tasks: bool = False) -> "RunConfig":
    """Load the configuration for a command that does not train, and check what the command needs of this machine."""
    config = run_config(given, backend=backend)
    from ray_jobs.run.preflight import check_before_acting

    sandbox = check_before_acting(config, draws_tasks=draws_tasks)
    if sandbox and sandbox.without:
        print(f"agentflow: code sandbox: {sandbox}", file=sys.stderr)
    return config


def init(
    folder: Annotated[Path, Parameter(name="FOLDER", help="a new folder; the run gets its name")],
    /,
    *,
    data: Annotated[Path | None, Parameter(help="CSV, JSON Lines or Parquet file with questions and answers")] = None,
    question: Annotated[str | None, Parameter(help="its column of questions, if it has another name")] = None,
    answer: Annotated[str | None, Parameter(help="its column of reference answers, if it has another name")] = None,
) -> None:
    """Write a small project: a custom agent, its tasks and reward, and a recipe that trains it.

    With --data the agent answers the file's questions in one call each.
    """
    from ray_jobs.run.project import write_project

    print(write_project(folder, data, question, answer))


def train(
    *given: Given,
    dry_run: Annotated[bool, Parameter(help="only check the recipe, as `agentflow check` does")] = False,
) -> int:
    """Train with a recipe, and write a report; continue an unfinished run.

    If reward.credit needs a process reward model and reward.credit.prm_path
    names none, the run trains one first, as `train-prm` does. A run with the
    same name and settings continues at its newest checkpoint. A finished run
    only shows its report; use another name=... for a new run.
    """
    from configs.loading import opening_comment, split_arguments

    if dry_run:
        return check(*given)
    _run(run_config(given), opening=opening_comment(split_arguments(given)[0]))
    return 0


def check(
    *given: Given,
    print_settings: Annotated[bool, Parameter(name="--print", help="print all settings as a recipe first")] = False,
) -> int:
    """Check a recipe without a run: tasks, reward, tools, and attempts with scripted replies.

    The replies follow the plan or the teacher of the recipe, or call each tool
    once and give the reference answer. Keys are used, and services are asked.
    """
    from ray_jobs.check import run_check

    return run_check(run_config(given), print_settings=print_settings)


def resume(
    run: RunFolder,
    /,
    *overrides: Annotated[str, Parameter(name="key=value", help="settings that may change: cluster.patience_s=600")],
) -> None:
    """Continue an interrupted run from its folder, at the newest valid checkpoint."""
    from ray_jobs.run.origin import saved_config, started_in

    config = saved_config(run, overrides)
    # The run's relative paths (data, a local model, custom code) start there.
    os.chdir(started_in(run))
    _run(config)


def _run(config: "RunConfig", opening: str = "") -> None:
    """Check everything before torch and Ray are imported, then print `opening` and train; only show a finished run."""
    from ray_jobs.run.origin import finished_summary, trains_prm
    from ray_jobs.run.preflight import check_before_start

    if summary := finished_summary(config):
        from ray_jobs.run.summary import print_summary
        from ray_jobs.viewer.report import write_report

        print(f"run '{config.run_path}' is already finished; choose another name=... to start a new run")
        print_summary(summary, write_report(config.run_path))
        return
    with_prm = trains_prm(config)
    ready = check_before_start(config, with_prm=with_prm)
    if opening:
        print(printable(opening), flush=True)
    from ray_jobs.train import run_training

    run_training(config, ready, with_prm=with_prm)


def train_prm(*given: Given, adapter: Adapter = None) -> None:
    """Train a process reward model on labelled attempts of the base model or of an adapter, and measure its quality."""
    config = acting_config(given, draws_tasks=True)
    from ray_jobs.prm import run_train_prm

    run_train_prm(config, adapter)


def submit(
    *given: Given,
    phase: Annotated[Phase, Parameter(help="the command to run there")] = "train",
    working_dir: Annotated[
        Path, Parameter(metavar="FOLDER", help="the folder to upload, without caches and runs")
    ] = Path(),
    follow: Annotated[bool, Parameter(help="print the job's log until it ends")] = False,
    options: Annotated[
        tuple[str, ...],
        Parameter(
            converter=lambda _, tokens: tuple(shlex.split(tokens[-1].value)),
            metavar="TEXT",
            allow_leading_hyphen=True,
            help="more options of the phase's command, e.g. --options='--benchmark gpqa --limit 20'",
        ),
    ] = (),
    runtime_env: Annotated[
        File, Parameter(help="YAML or JSON to add to Ray's runtime environment (pip, env_vars, excludes, ...)")
    ] = None,
    address: Annotated[
        str | None,
        Parameter(
            metavar="A",
            help="http://host:8265 (the dashboard) or host:port of a cluster; default: RAY_API_SERVER_ADDRESS, "
            "RAY_ADDRESS, or the cluster on this machine",
        ),
    ] = None,
) -> int:
    """Run `train` or one of its phases as a job on a Ray cluster; see `ray job --help` to list and stop jobs."""
    from configs.loading import split_arguments

    path, changes = split_arguments(given)
    from ray_jobs.submit import SubmitRequest, run_submit

    request = SubmitRequest(
        recipe=path,
        overrides=changes,
        phase=phase,
        address=address,
        working_dir=working_dir,
        phase_options=options,
        runtime_env=runtime_env,
    )
    return run_submit(request, follow=follow)


def evaluate(
    *given: Given,
    adapter: Adapter = None,
    backend: Backend = None,
    benchmark: Benchmarks = (),
    data: Annotated[Folder, Parameter(help="folder with the benchmark files; without it they are downloaded")] = None,
    part: Annotated[bool, Parameter(help="accept files with only a part of a benchmark")] = False,
    seeds: Annotated[Count, Parameter(metavar="N", help="attempts at every item")] = 1,
    limit: Annotated[Count | None, Parameter(metavar="K", help="use at most K items of each benchmark")] = None,
    out: Annotated[Folder, Parameter(help="folder for the results; an unfinished evaluation in it continues")] = None,
) -> None:
    """Evaluate on benchmarks or held-out tasks; continue an unfinished evaluation."""
    if not benchmark and (data or part):
        raise UserError(f"{'--data' if data else '--part'} needs --benchmark: held-out tasks have no benchmark files")
    config = acting_config(given, backend=backend, draws_tasks=not benchmark)
    from ray_jobs.evaluate import check_evaluation, evaluation_items, run_evaluation

    check_evaluation(config, num_seeds=seeds)
    items = evaluation_items(config, adapter=adapter, benchmarks=benchmark, data=data, whole=not part, limit=limit)
    run_evaluation(config, items, adapter=adapter, num_seeds=seeds, out=out)


def compare(
    before: Annotated[Path, Parameter(name="A", help="folder of an evaluation, or alone: of a training run")],
    after: Annotated[Path | None, Parameter(name="B", help="folder of the evaluation to compare with it")] = None,
    /,
    *,
    out: Annotated[Folder, Parameter(help="folder for the comparison (default: inside of B)")] = None,
    anyway: Annotated[bool, Parameter(help="compare evaluations that differ in more than the policy")] = False,
) -> None:
    """Compare two evaluations of the same items with paired statistics."""
    from ray_jobs.compare import run_compare

    run_compare(before, after, out=out, anyway=anyway)


def view(
    *runs: Annotated[Path, Parameter(name="RUN", help="one, or two to compare; without it the newest below runs/")],
    port: Annotated[int, Parameter(help="port on 127.0.0.1; 0: any free one")] = 8770,
    no_browser: Annotated[bool, Parameter(help="only print the address")] = False,
) -> None:
    """Open a run in the browser, also while it trains: every step, and why."""
    from ray_jobs.viewer.server import run_view

    run_view(runs, port=port, browser=not no_browser)


def solve(
    question: Annotated[str, Parameter(name="QUESTION", help="in quotes")],
    /,
    *given: Given,
    adapter: Adapter = None,
    backend: Backend = None,
    trace: Annotated[File, Parameter(help="append the trajectory to this file, in the format of training")] = None,
) -> int:
    """Solve one question and print the steps as they happen."""
    config = acting_config(given, backend=backend)
    from ray_jobs.solve import run_solve

    return run_solve(config, question, adapter, trace)


def export(
    source: Annotated[Path, Parameter(name="RUN|CHECKPOINT", help="a run (its newest checkpoint) or a checkpoint")],
    /,
    *,
    to: Annotated[Path, Parameter(metavar="FOLDER", help="a new folder")],
    format: Annotated[Literal["hf", "gguf", "hf,gguf"], Parameter(help="what to write")] = "hf,gguf",
    quantize: Annotated[Quantization, Parameter(help="quantization of the GGUF file")] = "q8_0",
) -> None:
    """Write a policy as a merged Hugging Face model, a GGUF file and a Modelfile."""
    from ray_jobs.export import run_export

    run_export(source, to, formats=format.split(","), quantization=quantize)


def plan(
    *given: Given,
    card: Annotated[
        str | None, Parameter(metavar="NAME|GiB", help="A40 (default), L40S, A100, H100, H200, L4, ... or its GiB")
    ] = None,
) -> int:
    """Compute whether a run fits its card or this machine's memory, and estimate its time on a card."""
    config = run_config(given)
    from ray_jobs.plan import run_plan

    return run_plan(config, card=card)


def doctor() -> int:
    """Show what is installed, and what this machine can run."""
    from ray_jobs.run.doctor import run_doctor

    return run_doctor()


def serve_tools(*given: Given) -> None:
    """Serve a recipe's tools to an MCP client over stdio."""
    config = run_config(given)
    from ray_jobs.solve import run_serve_tools

    run_serve_tools(config)


COMMANDS: dict[str, tuple[Callable[..., int | None], ...]] = {
    "Commands": (init, check, train, resume, submit, evaluate, compare, view, solve, plan, export, doctor),
    "More commands": (train_prm, serve_tools),
}


def make_app() -> App:
    """Build the command line; `agentflow --help` lists the commands in this order."""
    app = App(
        name="agentflow",
        help="Reinforcement learning for tool-using agents, asynchronous on Ray.\n\n"
        "`agentflow help COMMAND` describes a command.",
        help_format="plaintext",
        version=lambda: f"agentflow {version('agentflow-ray')}",
        default_parameter=Parameter(negative=(), show_default=lambda value: str(value) if value else None),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    app["--help"].group = app["--version"].group = "More commands"
    for group, commands in COMMANDS.items():
        for place, command in enumerate(commands):
            app.command(command, group=group, sort_key=place)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user's error is one line on stderr and code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    signals: list[int] = []
    try:
        with _sigterm_interrupts(signals):
            return int(make_app()(words) or 0)
    except KeyboardInterrupt as interrupt:
        event, code = ("ended by SIGTERM", 143) if signals else ("interrupted", 130)
        print(f"agentflow: {event}{f'; {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        return code
    except Exception as error:
        from configs.api_keys import redact_output

        redact_output()
        line = str(error) if isinstance(error, CycloptsError) else user_error(error)
        if line is None:
            raise
        print(f"agentflow: error: {printable(' '.join(line.split()))}", file=sys.stderr)
        return 2


@contextmanager
def _sigterm_interrupts(signals: list[int]) -> Iterator[None]:
    """Handle SIGTERM, which schedulers and `ray job stop` send, like Ctrl-C, so that child processes end."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        # Ray turns an exception that is raised here, while Ray waits, into this class.
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
