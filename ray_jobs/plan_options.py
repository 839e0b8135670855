"""The options of `agentflow plan`. Imports nothing heavy."""

import argparse
from pathlib import Path


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
