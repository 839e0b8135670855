"""One table, promise by promise: what README and docs say, what was measured just now, and whether it holds.

    python -m benchmarks.promises [--seed K] [--only NAME ...]

Each module of `benchmarks/promised` names its promises in `PROMISES`. Each promise is measured in a process of its own,
one after the other; the exit code is 1 if one does not hold. Takes under 10 minutes on two cores.
"""

import argparse
import importlib
import multiprocessing
import pkgutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from rich.console import Console
from rich.table import Table

from benchmarks import promised
from benchmarks.promised.promise import Measured, Promise


def all_promises() -> dict[str, Promise]:
    """By name, in the order of the modules' names. Raises ValueError where two have the same name."""
    found: dict[str, Promise] = {}
    for info in pkgutil.iter_modules(promised.__path__):
        module = importlib.import_module(f"{promised.__name__}.{info.name}")
        for promise in getattr(module, "PROMISES", ()):
            if promise.name in found:
                raise ValueError(f"two promises are named '{promise.name}'")
            found[promise.name] = promise
    return found


def measured(promise: Promise, seed: int) -> Measured:
    """In a fresh process, so that none sees another's threads, modules or settings."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_measure, promise.name, seed).result()
        except Exception as error:
            return Measured(f"{type(error).__name__}: {error}", holds=False)


def _measure(name: str, seed: int) -> Measured:
    return all_promises()[name].measure(seed)


def main(arguments: Sequence[str] | None = None) -> int:
    promises = all_promises()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of every measurement's random numbers (default 0)")
    parser.add_argument("--only", nargs="+", choices=list(promises), metavar="NAME", help=", ".join(promises))
    options = parser.parse_args(arguments)
    console = Console(width=max(Console().width, 150))
    table = Table("promise", "said", "where", "measured just now", "s", "holds", title=f"seed {options.seed}")
    broken = []
    for name in options.only or promises:
        started = time.perf_counter()
        console.print(f"{name} ...", highlight=False)
        result = measured(promises[name], options.seed)
        seconds = f"{time.perf_counter() - started:.1f}"
        table.add_row(
            name, promises[name].said, promises[name].where, result.text, seconds, "yes" if result.holds else "NO"
        )
        broken += [] if result.holds else [name]
    console.print(table)
    verb = "does" if len(broken) == 1 else "do"
    said = f"{len(broken)} {verb} not hold: {', '.join(broken)}" if broken else "all hold"
    console.print(said, highlight=False)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
