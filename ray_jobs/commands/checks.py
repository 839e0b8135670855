"""Commands that plan a run, check this machine, and run the tools by hand."""

from typing import Annotated, Literal

from cyclopts import Parameter

from ray_jobs.commands.given import File, Given, Seconds, run_config


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


def doctor() -> int:
    """Say what is installed, and what this machine can run."""
    from ray_jobs.checks.doctor import run_doctor

    return run_doctor()


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
