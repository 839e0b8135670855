"""The options of `agentflow evaluate` and `agentflow compare`."""

import argparse
from pathlib import Path

from ray_jobs.command_parser import whole_number


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
