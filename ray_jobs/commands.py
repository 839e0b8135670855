"""What each command of `agentflow` runs. Heavy imports happen inside, so that help is instant."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.run import RunConfig
    from envs.sandbox import SandboxState


def _config(options: argparse.Namespace) -> "RunConfig":
    from configs.loading import load_run_config

    return load_run_config(options.recipe, [*options.overrides, *_backend_overrides(options)])


def _backend_overrides(options: argparse.Namespace) -> list[str]:
    """`--backend KIND:MODEL` in the words of the configuration, which says what is wrong with it."""
    import json

    kind, _, model = (getattr(options, "backend", None) or "").partition(":")
    if not kind:
        return []
    key = "model.path" if kind == "vllm" else "backend.model"
    return [f"backend.type={json.dumps(kind)}", *([f"{key}={json.dumps(model)}"] if model else [])]


def _checked_config(options: argparse.Namespace, *, draws_tasks: bool) -> "RunConfig":
    """For the commands that only act."""
    config = _config(options)
    from ray_jobs.run.preflight import check_before_acting

    _tell_of_sandbox(check_before_acting(config, draws_tasks=draws_tasks))
    return config


def _tell_of_sandbox(state: "SandboxState | None") -> None:
    """On stderr, where it is not the first choice."""
    if state is not None and state.without:
        print(f"agentflow: code sandbox: {state}", file=sys.stderr)


def _adapter(options: argparse.Namespace) -> Path | None:
    """The checkpoint that `--adapter` names, None for the base model. Raises CheckpointError."""
    if options.adapter in (None, "none"):
        return None
    from ray_jobs.run.begun import checkpoint_at

    return checkpoint_at(Path(options.adapter).expanduser())


def train(options: argparse.Namespace) -> int:
    config = _config(options)
    if options.dry_run:
        from configs.loading import render_config
        from ray_jobs.run.preflight import check_before_start

        print(render_config(config), end="", flush=True)
        ready = check_before_start(config, with_prm=options.with_prm, resume=options.resume, download=False)
        _tell_of_sandbox(ready.sandbox)
        return 0
    return _run(config, with_prm=options.with_prm, resume=options.resume)


def resume(options: argparse.Namespace) -> int:
    from ray_jobs.run.begun import begun_run, started_in

    config, with_prm = begun_run(options.run_folder)
    # Its relative paths start there: data, a local model, tools of one's own.
    os.chdir(started_in(options.run_folder))
    return _run(config, with_prm=with_prm, resume=True)


def _run(config: "RunConfig", *, with_prm: bool, resume: bool) -> int:
    """Checked before torch and Ray are imported; a run that has ended already is only shown."""
    from ray_jobs.run.begun import finished_summary

    if resume and (summary := finished_summary(config)):
        from ray_jobs.pages.report import write_report
        from ray_jobs.run.console import print_summary
        from ray_jobs.run.folder import run_path

        print_summary(summary, write_report(run_path(config)))
        return 0
    from ray_jobs.run.preflight import check_before_start

    ready = check_before_start(config, with_prm=with_prm, resume=resume)
    from ray_jobs.train import run_training

    run_training(config, ready, with_prm=with_prm, resume=resume)
    return 0


def submit(options: argparse.Namespace) -> int:
    from ray_jobs.jobs.submit import run_submit
    from ray_jobs.options import submit_options

    return run_submit(submit_options(options))


def status(options: argparse.Namespace) -> int:
    from ray_jobs.jobs.watch import run_status

    return run_status(options.address, options.job)


def logs(options: argparse.Namespace) -> int:
    from ray_jobs.jobs.watch import run_logs

    return run_logs(options.address, options.job, keep_on=options.follow)


def stop(options: argparse.Namespace) -> int:
    from ray_jobs.jobs.watch import run_stop

    return run_stop(options.address, options.job)


def chaos(options: argparse.Namespace) -> int:
    config = _config(options)
    from ray_jobs.run.preflight import check_before_start

    with_prm = config.reward.prm is not None
    check_before_start(config, with_prm=with_prm, resume=True)
    from ray_jobs.checks.chaos.run import run_chaos

    job = "pipeline" if with_prm else "train"
    start = [sys.executable, "-m", "ray_jobs.cli", job, str(options.recipe), *options.overrides]
    return run_chaos(
        config,
        start,
        num_faults=options.faults,
        seed=options.seed,
        only=options.only or (),
        two_machines=options.two_machines,
    )


def evaluate(options: argparse.Namespace) -> int:
    config = _checked_config(options, draws_tasks=not options.benchmarks)
    from ray_jobs.evaluation.evaluate import EvaluationRequest, run_evaluation

    run_evaluation(
        config,
        EvaluationRequest(
            adapter=_adapter(options),
            benchmarks=options.benchmarks,
            data=options.data,
            whole=not options.part,
            num_seeds=options.seeds,
            limit=options.limit,
            out=options.out,
        ),
    )
    return 0


def compare(options: argparse.Namespace) -> int:
    from ray_jobs.evaluation.compare import run_compare

    run_compare(options.before, options.after, out=options.out, anyway=options.anyway)
    return 0


def solve(options: argparse.Namespace) -> int:
    config = _checked_config(options, draws_tasks=False)
    from ray_jobs.phases.solve import run_solve

    return run_solve(config, options.question, _adapter(options), options.trace)


def export(options: argparse.Namespace) -> int:
    from ray_jobs.export.export import ExportOptions, run_export

    settings = ExportOptions(formats=options.format, quantization=options.quantize, num_prompts=options.prompts)
    run_export(options.source, options.recipe, options.to, settings)
    return 0


def serve(options: argparse.Namespace) -> int:
    options.backend = f"ollama:{options.model}"
    config = _config(options)
    from ray_jobs.export.serve import run_serve

    run_serve(config, options.export)
    return 0


def collect(options: argparse.Namespace) -> int:
    config = _checked_config(options, draws_tasks=True)
    from ray_jobs.phases.collect import run_collect

    run_collect(config, _adapter(options))
    return 0


def label(options: argparse.Namespace) -> int:
    config = _config(options)
    from ray_jobs.phases.label import run_label

    run_label(config, _adapter(options), dry_run=options.dry_run)
    return 0


def train_prm(options: argparse.Namespace) -> int:
    config = _config(options)
    from ray_jobs.phases.train_prm import run_train_prm

    run_train_prm(config)
    return 0


def run_code(options: argparse.Namespace) -> int:
    from ray_jobs.phases.solve import run_code

    return run_code(options.file, options.timeout)


def serve_tools(options: argparse.Namespace) -> int:
    config = _config(options)
    from ray_jobs.phases.solve import run_serve_tools

    run_serve_tools(config, transport=options.transport, host=options.host, port=options.port)
    return 0


def doctor(options: argparse.Namespace) -> int:
    if options.recipe is not None:
        config = _checked_config(options, draws_tasks=False)
        from ray_jobs.checks.sync import run_sync_doctor

        return run_sync_doctor(config)
    from ray_jobs.checks.doctor import run_doctor

    return run_doctor()


def plan(options: argparse.Namespace) -> int:
    config = _config(options)
    from ray_jobs.plan.plan import run_plan

    return run_plan(config, card=options.card, model_config=options.model_config, as_json=options.json)


def simulate(options: argparse.Namespace) -> int:
    config = _config(options)
    from ray_jobs.simulate.simulate import run_simulate

    run_simulate(config, options)
    return 0
