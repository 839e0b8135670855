"""What is asked of a simulation: the options of `agentflow simulate`. Imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token
from cyclopts.validators import Number


def _numbers(_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    text = tokens[-1].value
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ValueError(f"'{text}' is not a list of whole numbers such as 1,2,4") from None
    if numbers[0] < 0:
        raise ValueError(f"'{text}' holds a negative number")
    return numbers


Numbers = Annotated[tuple[int, ...], Parameter(converter=_numbers, metavar="N,N", allow_leading_hyphen=True)]
Count = Annotated[int, Parameter(validator=Number(gte=1), metavar="N")]
Share = Annotated[float | None, Parameter(metavar="SHARE")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRequest:
    """None and an empty list take what the run or the recipe says."""

    run: Annotated[Path | None, Parameter(metavar="RUN", help="durations, shares and clocks of this run")] = None
    workers: Annotated[Numbers, Parameter(help="numbers of workers (default: the recipe's, and twice that)")] = ()
    depth: Annotated[Numbers, Parameter(help="pipeline depths D (default: 0,1,2,4 and the recipe's)")] = ()
    cap: Annotated[Numbers, Parameter(help="staleness caps S (default: the recipe's)")] = ()
    steps: Annotated[Count, Parameter(help="train steps")] = 200
    seed: Annotated[int, Parameter(help="seed of the drawn tasks, which all settings share")] = 0
    max_mean_staleness: Annotated[float, Parameter(metavar="X", help="bound for the best setting")] = 2.0
    max_masked: Annotated[float, Parameter(metavar="SHARE", help="bound for the best setting")] = 0.1
    places: Annotated[
        Count | None, Parameter(help="groups at a time on a worker (default: what the recipe's engine takes)")
    ] = None
    load_slope: Annotated[
        float, Parameter(metavar="X", help="n groups on a worker each take 1 + (n - 1) X times as long (default 0)")
    ] = 0.0
    step_s: Annotated[
        float | None, Parameter(metavar="S", help="seconds of a train step (default: the run's mean, or 20)")
    ] = None
    sync_s: Annotated[
        float | None,
        Parameter(metavar="S", help="seconds from new weights to sampling with them (default: the run's median, or 1)"),
    ] = None
    median_s: Annotated[
        float | None, Parameter(metavar="S", help="without --run: median seconds of a group (default 30)")
    ] = None
    sigma: Annotated[
        float | None,
        Parameter(metavar="X", help="without --run: lognormal seconds, deviation of their logarithm (default 1)"),
    ] = None
    alpha: Annotated[
        float | None, Parameter(metavar="X", help="without --run: Pareto seconds with this exponent instead")
    ] = None
    signal: Annotated[Share, Parameter(help="without --run: groups to train on (default 0.6)")] = None
    all_right: Annotated[Share, Parameter(help="without --run: groups without a wrong answer (default 0)")] = None
    failed: Annotated[Share, Parameter(help="without --run: groups that fail for good (default 0)")] = None
    json: Annotated[bool, Parameter(help="print everything as JSON")] = False


USUAL = SimulationRequest()
