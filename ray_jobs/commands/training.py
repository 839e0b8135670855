"""The commands that train: the main job, from its beginning or where it stands, and its phases one at a time."""

import os
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ray_jobs.commands.given import acting_config, checkpoint_of, run_config, tell_of_sandbox
from ray_jobs.commands.options import Adapter, Given, RunFolder

if TYPE_CHECKING:
    from configs.run import RunConfig


def train(
    *given: Given,
    dry_run: Annotated[bool, Parameter(help="print the configuration, make every check of a start, and stop")] = False,
) -> None:
    """Train a planner as a recipe says, and report; goes on with an unfinished run.

    Where reward.credit asks for a process reward model and reward.credit.prm_path
    names none, one is trained first: collect, label, train-prm. A run of the
    same name and settings is continued where it was cut off; of one that has
    ended the report is shown. For a new run: another name=...
    """
    config = run_config(given)
    if dry_run:
        _check(config)
    else:
        _run(config)


def resume(run: RunFolder, /) -> None:
    """Continue a run that was cut off, from its folder alone; nothing is lost."""
    from ray_jobs.run.begun import begun_run, started_in

    config, _ = begun_run(run)
    # Its relative paths start there: data, a local model, tools of one's own.
    os.chdir(started_in(run))
    _run(config)


def _check(config: "RunConfig") -> None:
    from configs.loading import render_config
    from ray_jobs.run.begun import trains_prm
    from ray_jobs.run.preflight import check_before_start

    print(render_config(config), end="", flush=True)
    tell_of_sandbox(check_before_start(config, with_prm=trains_prm(config), download=False).sandbox)


def _run(config: "RunConfig") -> None:
    """Checked before torch and Ray are imported; a run that has ended already is only shown."""
    from ray_jobs.checks.machine import fitted
    from ray_jobs.run.begun import finished_summary, trains_prm
    from ray_jobs.run.preflight import check_before_start

    if summary := finished_summary(config):
        from ray_jobs.pages.report import write_report
        from ray_jobs.run.console import print_summary

        print(f"the run in '{config.run_path}' has ended, and this is what it brought; for a new one: another name=...")
        print_summary(summary, write_report(config.run_path))
        return
    with_prm = trains_prm(config)
    if (config.run_path / "config.json").exists():
        config = fitted(config, print)
    ready = check_before_start(config, with_prm=with_prm)
    from ray_jobs.train import run_training

    run_training(config, ready, with_prm=with_prm)


def collect(*given: Given, adapter: Adapter = None) -> None:
    """Collect trajectories of the base model or an adapter, to label."""
    config = acting_config(given, draws_tasks=True)
    checkpoint = checkpoint_of(adapter)
    from ray_jobs.phases.collect import run_collect

    run_collect(config, checkpoint)


def label(
    *given: Given,
    adapter: Adapter = None,
    dry_run: Annotated[bool, Parameter(help="print what it would take and cost, and stop")] = False,
) -> None:
    """Label the steps of the collected trajectories."""
    config = run_config(given)
    checkpoint = checkpoint_of(adapter)
    from ray_jobs.phases.label import run_label

    run_label(config, checkpoint, dry_run=dry_run)


def train_prm(*given: Given) -> None:
    """Train a process reward model on the labels, and measure it."""
    config = run_config(given)
    from ray_jobs.phases.prm import run_train_prm

    run_train_prm(config)
