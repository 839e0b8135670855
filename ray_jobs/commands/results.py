"""The commands for what came of training: evaluate, compare, look, ask, export, serve."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from ray_jobs.commands.given import (
    FORMATS,
    Adapter,
    Backend,
    Benchmarks,
    Count,
    File,
    Folder,
    Formats,
    Given,
    GivenError,
    Quantization,
    Recipe,
    RunFolder,
    acting_config,
    checkpoint_of,
    run_config,
)


def evaluate(
    *given: Given,
    adapter: Adapter = None,
    backend: Backend = None,
    benchmark: Benchmarks = (),
    data: Annotated[Folder, Parameter(help="benchmark files; none downloads them")] = None,
    part: Annotated[bool, Parameter(help="take files that hold only a part of a benchmark")] = False,
    seeds: Annotated[Count, Parameter(metavar="N", help="tries at every item")] = 1,
    limit: Annotated[Count | None, Parameter(metavar="K", help="so many items of each benchmark")] = None,
    out: Annotated[Folder, Parameter(help="of the results; one that is begun goes on")] = None,
) -> None:
    """Solve benchmarks or held-out tasks; goes on where it ended."""
    if not benchmark and (data or part):
        raise GivenError(
            f"{'--data' if data else '--part'} is about the files of benchmarks, and the recipe's held-out tasks have "
            "none; name some with --benchmark, or leave it out"
        )
    config = acting_config(given, backend=backend, draws_tasks=not benchmark)
    checkpoint = checkpoint_of(adapter)
    from ray_jobs.evaluate import EvaluationRequest, run_evaluation

    asked = EvaluationRequest(
        adapter=checkpoint, benchmarks=benchmark, data=data, whole=not part, num_seeds=seeds, limit=limit, out=out
    )
    run_evaluation(config, asked)


def compare(
    before: Annotated[Path, Parameter(name="A", help="folder of an evaluation, or alone: of a training run")],
    after: Annotated[Path | None, Parameter(name="B", help="folder of the evaluation to compare with it")] = None,
    /,
    *,
    out: Annotated[Folder, Parameter(help="of the comparison (default: inside of B)")] = None,
    anyway: Annotated[bool, Parameter(help="compare what differs in more than policy, and say so")] = False,
) -> None:
    """Compare two evaluations of the same items: paired, tested, and what it proves."""
    from ray_jobs.compare import run_compare

    run_compare(before, after, out=out, anyway=anyway)


def view(
    run: RunFolder,
    /,
    *others: Annotated[Path, Parameter(name="RUN", help="of another run, to compare with it")],
    port: Annotated[int, Parameter(help="on 127.0.0.1; 0: any free one")] = 8770,
    no_browser: Annotated[bool, Parameter(help="only print the address")] = False,
) -> None:
    """Look at a run in the browser, also while it trains: every step, and why."""
    from ray_jobs.viewer.server import run_view

    run_view([run, *others], port=port, browser=not no_browser)


def solve(
    question: Annotated[str, Parameter(name="QUESTION", help="in quotes")],
    /,
    *given: Given,
    recipe: Recipe = None,
    adapter: Adapter = None,
    backend: Backend = None,
    trace: Annotated[File, Parameter(help="append the trajectory, as training writes them")] = None,
) -> int:
    """Solve one question and print the steps as they happen."""
    config = acting_config([*filter(None, (recipe, *given))], backend=backend)
    checkpoint = checkpoint_of(adapter)
    from ray_jobs.phases.solve import run_solve

    return run_solve(config, question, checkpoint, trace)


def export(
    source: Annotated[str, Parameter(name="RUN|CHECKPOINT", help="a run's newest checkpoint, a checkpoint, or `none`")],
    /,
    *,
    to: Annotated[Path, Parameter(metavar="FOLDER", help="a folder that is not there yet")],
    format: Annotated[Formats, Parameter(help="what to write")] = FORMATS,
    quantize: Annotated[Quantization, Parameter(help="of the GGUF file")] = "q8_0",
    prompts: Annotated[
        int,
        Parameter(metavar="N", help="planner prompts that measure the quantisation; 0: none", validator=Number(gte=0)),
    ] = 8,
    recipe: Annotated[File, Parameter(help="recipe of a checkpoint that lies in no run folder")] = None,
) -> None:
    """Write a policy as a merged Hugging Face model, a GGUF file and a Modelfile."""
    from ray_jobs.export.export import run_export

    run_export(source, recipe, to, formats=format, quantization=quantize, num_prompts=prompts)


def serve(
    export: Annotated[Path, Parameter(name="EXPORT", help="folder that `agentflow export` wrote")],
    /,
    *given: Given,
    model: Annotated[str, Parameter(help="its name there")] = "agentflow",
    recipe: Recipe = None,
) -> None:
    """Make an export a model of a running Ollama, and try it."""
    config = run_config([*filter(None, (recipe, *given))], backend=f"ollama:{model}")
    from ray_jobs.export.serve import run_serve

    run_serve(config, export)
