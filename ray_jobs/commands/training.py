"""The commands that train: a project to begin with, the main job, and its phases one at a time."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from configs.errors import UserError
from ray_jobs.commands.given import Adapter, Given, RunFolder, acting_config, checkpoint_of, run_config, tell_of_sandbox

if TYPE_CHECKING:
    from configs.run import RunConfig

STARTER = Path(__file__).parent / "starter"


class ProjectError(UserError):
    """The folder cannot become a project; the message says why."""


def init(folder: Annotated[Path, Parameter(name="FOLDER", help="a new folder, whose name the run gets")], /) -> None:
    """Write a small project of your own: an agent, its tasks and reward, and a recipe that trains it."""
    from pydantic import ValidationError

    from configs.run import RunConfig
    from configs.wording import reason

    name = folder.absolute().name
    try:
        RunConfig(name=name)
    except ValidationError as error:
        raise ProjectError(f"'{name}' cannot name a run: {reason(error)}") from None
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ProjectError(f"'{folder}' is there already; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(STARTER.iterdir()):
        if file.is_file():
            (folder / file.name).write_text(file.read_text().replace("PROJECT", name))
    print(f"wrote {folder}: agent.py, warehouse.py (tasks, reward, teacher), recipe.toml")
    print(f"train it: cd {shlex.quote(str(folder))} && agentflow train recipe.toml")


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
    """Continue a run that was cut off, from its folder alone: at the newest good checkpoint."""
    from ray_jobs.run.begun import begun_config, started_in

    config = begun_config(run)
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
        from ray_jobs.run.summary import print_summary
        from ray_jobs.viewer.report import write_report

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
