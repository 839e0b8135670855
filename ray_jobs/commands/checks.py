"""The commands that plan and prove: what fits, what is installed, what holds under faults; and the tools by hand."""

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from ray_jobs.commands.given import Count, File, Given, GivenError, Seconds, acting_config, run_config, sorted_out


def plan(
    *given: Given,
    card: Annotated[
        str | None,
        Parameter(metavar="NAME|GiB", help="A40 (the default), L40S, A100, H100, H200, L4, ... or its GiB"),
    ] = None,
    model_config: Annotated[File, Parameter(help="the policy's config.json (default: of model.path)")] = None,
    json: Annotated[bool, Parameter(help="print the plan as JSON")] = False,
) -> int:
    """Say whether a run fits its card, or on a CPU this machine: every GiB with its arithmetic."""
    config = run_config(given)
    from ray_jobs.plan.plan import run_plan

    return run_plan(config, card=card, model_config=model_config, as_json=json)


def doctor(
    *given: Given,
    sync: Annotated[bool, Parameter(help="prove a recipe's weight sync: every fault must be caught")] = False,
) -> int:
    """Say what is installed, and what this machine can run."""
    if sync:
        config = acting_config(given)
        from ray_jobs.checks.sync import run_sync_doctor

        return run_sync_doctor(config)
    if given:
        raise GivenError(f"unrecognized arguments: {' '.join(given)}; only --sync takes a recipe")
    from ray_jobs.checks.doctor import run_doctor

    return run_doctor()


def chaos(
    *given: Given,
    faults: Annotated[Count, Parameter(help="how many")] = 20,
    seed: Annotated[int, Parameter(help="which faults happen, and when")] = 0,
    only: Annotated[tuple[str, ...], Parameter(metavar="FAULT", help="kill-rollout, hang-learner, ...")] = (),
    two_machines: Annotated[bool, Parameter(help="on a cluster of two nodes, one of which may go")] = False,
    twin: Annotated[File, Parameter(metavar="FOLDER", help="of the same job at depth 0, left in peace")] = None,
) -> int:
    """Do random faults to a small job, and see whether it is sound."""
    path, changes = sorted_out(given)
    # A job on machines that are started for it has their places, not this machine's.
    config = run_config([*given, "cluster.address=127.0.0.1:0"] if two_machines else given)
    from ray_jobs.run.begun import trains_prm
    from ray_jobs.run.preflight import check_before_start

    check_before_start(config, with_prm=trains_prm(config))
    from ray_jobs.checks.chaos.run import run_chaos

    start = [sys.executable, "-m", "ray_jobs.cli", "train", str(path), *changes]
    return run_chaos(config, start, num_faults=faults, seed=seed, only=only, two_machines=two_machines, twin=twin)


def run_code(
    file: Annotated[str, Parameter(name="FILE")], /, *, timeout: Annotated[Seconds, Parameter(metavar="S")] = 5.0
) -> int:
    """Run a Python file in the sandbox."""
    from ray_jobs.phases.solve import run_code

    return run_code(file, timeout)


def serve_tools(
    *given: Given,
    transport: Annotated[Literal["stdio", "http"], Parameter(help="stdio for one client, http for many")] = "stdio",
    host: Annotated[str, Parameter(help="address for http")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="port for http; 0: any free one")] = 8765,
) -> None:
    """Serve a recipe's tools to any MCP client."""
    config = run_config(given)
    from ray_jobs.phases.solve import run_serve_tools

    run_serve_tools(config, transport=transport, host=host, port=port)
