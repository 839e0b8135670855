"""The options of `agentflow simulate`; apart from the command, whose imports would slow down every other one's help."""

import argparse
from pathlib import Path


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--run", dest="run_folder", type=Path, metavar="RUN_FOLDER", help="durations, shares and clocks of this run")
    option("--workers", type=_numbers, metavar="N,N", help="numbers of workers (default: the recipe's, and twice that)")
    option("--depth", type=_numbers, metavar="N,N", help="pipeline depths D (default: 0,1,2,4 and the recipe's)")
    option("--cap", type=_numbers, metavar="N,N", help="staleness caps S (default: the recipe's)")
    option("--steps", type=_positive, default=200, help="train steps (default 200)")
    option("--seed", type=int, default=0, help="seed of the drawn tasks, which all settings share (default 0)")
    option("--max-mean-staleness", type=float, default=2.0, metavar="X", help="bound for the best setting (default 2)")
    option("--max-masked", type=float, default=0.1, metavar="SHARE", help="bound for the best setting (default 0.1)")
    option("--places", type=_positive, help="groups at a time on a worker (default: what the recipe's engine takes)")
    option(
        "--load-slope",
        type=float,
        default=0.0,
        metavar="X",
        help="n groups on a worker each take 1 + (n - 1) X times as long (default 0)",
    )
    option("--step-s", type=float, metavar="S", help="seconds of a train step (default: the run's mean, or 20)")
    option(
        "--sync-s",
        type=float,
        metavar="S",
        help="seconds from new weights to sampling with them (default: the run's median, or 1)",
    )
    option("--median-s", type=float, metavar="S", help="without --run: median seconds of a group (default 30)")
    option("--sigma", type=float, help="without --run: lognormal seconds, deviation of their logarithm (default 1)")
    option("--alpha", type=float, help="without --run: Pareto seconds with this exponent instead")
    option("--signal", type=float, metavar="SHARE", help="without --run: groups to train on (default 0.6)")
    option("--all-right", type=float, metavar="SHARE", help="without --run: groups without a wrong answer (default 0)")
    option("--failed", type=float, metavar="SHARE", help="without --run: groups that fail for good (default 0)")
    option("--json", action="store_true", help="print everything as JSON")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of whole numbers such as 1,2,4") from None
    if numbers[0] < 0:
        raise argparse.ArgumentTypeError(f"'{text}' holds a negative number")
    return numbers


def _positive(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return number
