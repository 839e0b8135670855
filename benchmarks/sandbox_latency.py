"""Measures the sandbox: cold start, a fresh run, a later call of an episode, and many episodes at once."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import quantiles

from rich.console import Console
from rich.table import Table

from envs.sandbox import Sandbox

_NUM_STARTS, _NUM_RUNS, _NUM_CALLS, _NUM_EPISODES = 5, 200, 1000, 64
_CODE = "sum(n * n for n in range(100))"


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _start_and_close() -> None:
    Sandbox().close()


def _concurrent_calls(sandbox: Sandbox) -> tuple[list[float], list[float]]:
    """Seconds of the first and of a later call of episodes that all run at the same time."""
    episodes = [sandbox.episode() for _ in range(_NUM_EPISODES)]
    with ThreadPoolExecutor(_NUM_EPISODES) as threads:
        first, later = (
            list(threads.map(lambda episode: _timed(lambda: episode.run(_CODE)), episodes)) for _ in range(2)
        )
        list(threads.map(lambda episode: episode.close(), episodes))
    return first, later


def main() -> None:
    rows: list[tuple[str, Sequence[float]]] = [("cold start", [_timed(_start_and_close) for _ in range(_NUM_STARTS)])]
    with Sandbox() as sandbox, sandbox.episode() as episode:
        walls = str(sandbox.state)
        rows.append(("fresh run", [_timed(lambda: sandbox.run(_CODE)) for _ in range(_NUM_RUNS)]))
        episode.run(_CODE)
        rows.append(("later call", [_timed(lambda: episode.run(_CODE)) for _ in range(_NUM_CALLS)]))
        first, later = _concurrent_calls(sandbox)
        rows += [(f"{_NUM_EPISODES} at once, first", first), (f"{_NUM_EPISODES} at once, later", later)]
    table = Table("what", "samples", "p50 ms", "p95 ms", title=f"Sandbox, {walls}")
    for name, seconds in rows:
        cuts = quantiles(seconds, n=20, method="inclusive")
        table.add_row(name, str(len(seconds)), f"{cuts[9] * 1000:.2f}", f"{cuts[18] * 1000:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
