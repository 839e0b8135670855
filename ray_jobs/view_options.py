"""`agentflow view`: its options, and what it runs."""

import argparse
from pathlib import Path
from typing import Any

DEFAULT_PORT = 8770


def add_view_options(adding: "argparse._SubParsersAction[Any]") -> None:
    view = adding.add_parser("view", help="look at a run in the browser, also while it trains: every step, and why")
    view.add_argument("run_folders", nargs="+", type=Path, metavar="RUN", help="folder of a run; two are compared")
    says = f"port on 127.0.0.1 (default {DEFAULT_PORT}; 0: any free one)"
    view.add_argument("--port", type=int, default=DEFAULT_PORT, help=says)
    view.add_argument("--no-browser", dest="browser", action="store_false", help="only print the address")
    view.set_defaults(run=_view)


def _view(options: argparse.Namespace) -> int:
    from ray_jobs.view import run_view

    run_view(options.run_folders, port=options.port, browser=options.browser)
    return 0
