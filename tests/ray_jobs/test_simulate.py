import json
import re

import pytest

from configs.errors import UserError
from configs.run import RunConfig
from ray_jobs.cli import main, make_app
from ray_jobs.simulate.simulate import Point, best_point, limit, run_simulate, simulation_inputs
from ray_jobs.simulate.simulation import SimulationResult
from ray_jobs.simulate.worker import DrawnTask
from rollout.store.ledger import Ledger
from rollout.store.lifecycle import GroupCounts, GroupResult

FAST = ("--steps", "12", "--step-s", "10", "--median-s", "10")


def make_options(*arguments):
    _, bound, _ = make_app().parse_args(["simulate", *map(str, arguments)])
    return bound.arguments["request"]


def make_config(**changes):
    return RunConfig(**{"batch_groups": 2, "pipeline_depth": 1, "max_staleness": 8} | changes)


def make_result(**changes):
    values = {
        "trajectories_per_s": 1.0,
        "wall_s": 100.0,
        "learner_idle": 0.5,
        "backpressure": 0.0,
        "places_used": 1.0,
        "staleness_mean": 1.0,
        "staleness_p95": 2,
        "staleness_max": 3,
        "masked": 0.0,
        "counts": GroupCounts(),
        "bias": None,
        "num_open": 0,
        "cohort": (),
    }
    return SimulationResult(**values | changes)


def make_point(num_workers, depth, *, cap=8, **changes):
    return Point(num_workers=num_workers, pipeline_depth=depth, max_staleness=cap, result=make_result(**changes))


def make_run(folder, *, groups, steps=(), latencies=()):
    """A run folder with groups of (ending, seconds) that have ended."""
    folder.mkdir()
    ledger = Ledger(folder / "ledger.sqlite")
    permits = ledger.lease(0, len(groups), num_new=len(groups))
    for permit, (ending, seconds) in zip(permits, groups, strict=True):
        result = GroupResult(ending=None, payload=b"", versions={0: 5}, duration_s=seconds, facts={})
        if ending == "failed":
            ledger.settle(permit.lease, None, result, now=1.0)
        else:
            ledger.settle(permit.lease, ending, result, now=1.0)
    ledger.close()
    rows = [{"step": 0, "cold_start/loss": 1.0}, *({"step": 1, "learner/step_s": seconds} for seconds in steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "adapters").mkdir()
    if latencies:
        lines = (json.dumps({"worker": 0, "policy_version": 1, "latency_s": seconds}) + "\n" for seconds in latencies)
        (folder / "adapters" / "acknowledged.jsonl").write_text("".join(lines))
    return folder


# --- the grid ----------------------------------------------------------------------------------------


def test_table_has_a_row_per_setting_marks_the_best_and_says_what_limits(capsys):
    run_simulate(make_config(), make_options(*FAST, "--workers", "1", "--depth", "0,1"))
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert [row[:3] for row in rows if row[:1] == ["1"]] == [["1", "0", "8"], ["1", "1", "8"]]
    assert [row[1:3] for row in rows if row[-2:] == ["best", "recipe"]] == [["1", "8"]]
    assert printed.startswith("best: 1 worker, D=1, S=8, ")
    assert "trajectories/s. There rollouts limit" in printed.splitlines()[0]
    assert "best: the most trained trajectories/s" in printed
    assert "assumed: groups of 10 s in the median" in printed


def test_the_best_setting_is_compared_with_the_recipes_where_it_is_another(capsys):
    run_simulate(make_config(), make_options(*FAST, "--workers", "1,2", "--depth", "0,1", "--max-mean-staleness", "0"))
    assert re.match(r"best: 1 worker, D=0, S=8, [\d.]+ trajectories/s \(the recipe: [\d.]+\)", capsys.readouterr().out)


def test_json_holds_every_setting_of_the_grid_in_numbers(capsys):
    run_simulate(make_config(), make_options(*FAST, "--workers", "1,2", "--depth", "0,4", "--cap", "2,8", "--json"))
    found = json.loads(capsys.readouterr().out)
    knobs = [(one["num_workers"], one["pipeline_depth"], one["max_staleness"]) for one in found["settings"]]
    assert knobs == [(1, 0, 2), (1, 0, 8), (1, 4, 8), (2, 0, 2), (2, 0, 8), (2, 4, 8)]
    assert found["settings"][0]["result"]["counts"]["trained"] == 12 * 2
    assert found["settings"][0]["result"]["staleness_mean"] == 0
    assert found["limit"] in ("learner", "admission", "rollouts")


def test_the_recipe_gives_what_no_option_says(capsys):
    options = make_options(*FAST, "--json")
    run_simulate(make_config(pipeline_depth=3, rollout={"num_workers": 3}), options)
    found = json.loads(capsys.readouterr().out)
    assert {one["num_workers"] for one in found["settings"]} == {3, 6}
    assert [one["pipeline_depth"] for one in found["settings"][:5]] == [0, 1, 2, 3, 4]
    assert {one["max_staleness"] for one in found["settings"]} == {8}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--depth", "4", "--cap", "2"], "below every depth"),
        (["--workers", "0"], "--workers must be above 0"),
        (["--signal", "0.9", "--failed", "0.2"], "--signal must be above 0"),
        (["--alpha", "0"], "--median-s and --alpha must be above 0"),
        (["--step-s", "0"], "--step-s must be above 0"),
        (["--step-s", "nan"], "--step-s must be a finite number, got nan"),
        (["--load-slope", "inf"], "--load-slope must be a finite number, got inf"),
        (["--load-slope", "-1"], "--load-slope must not be below 0"),
        (["--run", "no-such-run"], r"ledger\.sqlite' does not exist"),
        (["--run", "any", "--sigma", "2"], "--sigma and --run cannot go together"),
    ],
)
def test_what_cannot_be_simulated_is_one_clear_error(arguments, said):
    with pytest.raises(UserError, match=said):
        run_simulate(make_config(), make_options(*arguments))


@pytest.mark.parametrize("arguments", [["--depth", "1,x"], ["--cap", "-1"], ["--steps", "0"]])
def test_what_is_no_number_is_refused_by_the_parser(arguments, capsys):
    assert main(["simulate", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


# --- the rule ----------------------------------------------------------------------------------------


def test_best_is_the_fastest_that_is_fresh_enough():
    points = [
        make_point(1, 1, trajectories_per_s=1.0),
        make_point(1, 2, trajectories_per_s=1.5, staleness_mean=1.9),
        make_point(1, 4, trajectories_per_s=2.0, staleness_mean=2.1),
    ]
    assert best_point(points, max_mean_staleness=2, max_masked=0.1) is points[1]
    assert best_point(points, max_mean_staleness=3, max_masked=0.1) is points[2]
    assert best_point(points, max_mean_staleness=0.5, max_masked=0.1) is None


def test_freshness_that_is_bought_by_masking_does_not_count():
    points = [
        make_point(1, 4, cap=4, trajectories_per_s=2.0, masked=0.24),
        make_point(1, 2, trajectories_per_s=1.5, masked=0.03),
    ]
    assert best_point(points, max_mean_staleness=2, max_masked=0.1) is points[1]
    assert best_point(points, max_mean_staleness=2, max_masked=0.3) is points[0]


def test_as_fast_with_fewer_workers_or_less_depth_is_better():
    points = [
        make_point(2, 4, trajectories_per_s=2.01),
        make_point(2, 2, trajectories_per_s=2.0, cap=2),
        make_point(2, 2, trajectories_per_s=2.0, cap=8),
        make_point(4, 1, trajectories_per_s=2.0),
        make_point(1, 4, trajectories_per_s=1.9),
    ]
    assert best_point(points, max_mean_staleness=2, max_masked=0.1) is points[2]


def test_what_limits_is_judged_as_in_a_real_run():
    assert limit(make_result(learner_idle=0.1, backpressure=0.9)) == "learner"
    assert limit(make_result(learner_idle=0.5, backpressure=0.9)) == "admission"
    assert limit(make_result(learner_idle=0.5, backpressure=0.0)) == "rollouts"


# --- an earlier run ----------------------------------------------------------------------------------


def test_a_run_gives_its_groups_its_steps_and_its_sync(tmp_path):
    ended = [("ready", 10.0), ("all_wrong", 30.0), ("all_right", 20.0), ("failed", 20.0)]
    folder = make_run(tmp_path / "run", groups=ended, steps=(4.0, 8.0), latencies=(0.5, 2.0, 9.0))
    inputs = simulation_inputs(make_options("--run", folder))
    assert sorted(inputs.tasks.groups, key=lambda one: (one.seconds, one.fate)) == [
        DrawnTask(seconds=10, fate="signal"),
        DrawnTask(seconds=20, fate="all_right"),
        DrawnTask(seconds=20, fate="failed"),
        DrawnTask(seconds=30, fate="all_wrong"),
    ]
    assert (inputs.step_s, inputs.sync_s) == (6.0, 2.0)
    assert "4 groups of 20 s in the median, 25% of them with signal" in inputs.said


def test_a_group_whose_seconds_nobody_knows_takes_as_long_as_the_others(tmp_path):
    """Regression: it took no time, which a run of groups that raised would have called fast."""
    ended = [("ready", 10.0), ("failed", 0.0), ("all_wrong", 30.0), ("failed", 0.0), ("all_right", 20.0)]
    folder = make_run(tmp_path / "run", groups=ended, steps=(4.0,))
    inputs = simulation_inputs(make_options("--run", folder))
    assert sorted(one.seconds for one in inputs.tasks.groups) == [10, 20, 20, 20, 30]
    assert "5 groups of 20 s in the median" in inputs.said


def test_a_measured_run_is_simulated(tmp_path, capsys):
    folder = make_run(tmp_path / "run", groups=[("ready", 10.0), ("ready", 40.0)] * 3, steps=(5.0,))
    run_simulate(make_config(), make_options("--run", folder, "--steps", 10, "--depth", 0, "--workers", 1, "--json"))
    (point,) = json.loads(capsys.readouterr().out)["settings"]
    assert point["result"]["wall_s"] <= 10 * (40 + 5) + 9


def test_a_clock_that_a_run_does_not_have_is_asked_for(tmp_path):
    folder = make_run(tmp_path / "run", groups=[("ready", 10.0)])
    with pytest.raises(UserError, match="say with --step-s"):
        simulation_inputs(make_options("--run", folder))
    assert simulation_inputs(make_options("--run", folder, "--step-s", 3)).step_s == 3


def test_a_run_without_signal_says_so(tmp_path):
    folder = make_run(tmp_path / "run", groups=[("all_wrong", 10.0)], steps=(5.0,))
    with pytest.raises(UserError, match="no group with signal has ended"):
        simulation_inputs(make_options("--run", folder))
