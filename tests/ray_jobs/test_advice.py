import os
import re

import pytest
from pydantic import BaseModel

from configs.loading import RECIPES, load_run_config, with_changes
from configs.run import RunConfig
from ray_jobs.checks.machine import check_machine
from ray_jobs.metrics.bottleneck import LIMITS, NO_ROOM, followable, hints
from ray_jobs.run.model_folder import PreflightError
from ray_jobs.run.preflight import check_before_acting

CPU_RECIPES = ["demo_cpu", "prm_cpu", "sync_cpu"]


@pytest.fixture
def machine(monkeypatch):
    def of(cores, gpus=0):
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
        monkeypatch.setattr("ray_jobs.checks.machine._num_gpus", lambda: gpus)

    return of


def keys_of(model, prefix=""):
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation, f"{prefix}{name}.")


def named(hint):
    """Settings in a hint: whatever has a dot or an underscore inside is no English word."""
    return set(re.findall(r"[a-z]+(?:[._][a-z]+)+", hint))


@pytest.mark.parametrize("recipe", CPU_RECIPES)
def test_two_cores_are_never_told_to_add_workers_or_threads(recipe, machine):
    machine(2)
    said = hints(load_run_config(RECIPES / f"{recipe}.toml"))
    refused = {"rollout.num_workers", "learner.num_threads", "prm.num_threads", "prm.device"}
    assert not [hint for hint in said.values() if named(hint) & refused]
    assert said["balanced"] == NO_ROOM


def test_more_cores_and_cards_are_told_what_they_have_room_for(machine):
    run = load_run_config(RECIPES / "prm_cpu.toml")
    machine(8)
    assert "rollout.num_workers" in hints(run)["engine"]
    assert named(hints(run)["balanced"]) == {"rollout.num_workers", "learner.num_threads"}
    assert "prm.device" not in named(hints(run)["prm"])
    machine(8, gpus=1)
    assert "set prm.device=cuda" in hints(run)["prm"]


def test_whoever_scores_turns_is_told_of_that_function_and_of_no_prm(machine):
    machine(8, gpus=1)
    credit = "reward.credit={type='outcome_gated', turn_scorer='mine:turns'}"
    assert hints(load_run_config(None, [credit]))["prm"] == "make the function of reward.credit.turn_scorer faster"


@pytest.mark.parametrize("gpus", [0, 1, 4])
@pytest.mark.parametrize("cores", [1, 2, 3, 64])
@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_whatever_is_advised_is_a_recipe_that_starts_where_this_one_does(recipe, cores, gpus, machine):
    machine(cores, gpus)
    run = load_run_config(recipe)
    try:
        check_machine(run)
    except PreflightError:
        return
    for limit in LIMITS:
        for advice, changes in followable(run, limit):
            assert set(changes) <= named(advice.text) | {"max_staleness"}
            check_machine(with_changes(run, changes))


@pytest.mark.parametrize("depth", [0, 8])
def test_the_depth_is_lowered_and_raised_only_within_its_bounds(depth, machine):
    machine(2)
    run = load_run_config(RECIPES / "demo_cpu.toml", [f"pipeline_depth={depth}", "max_staleness=8"])
    assert ("pipeline_depth" in hints(run)["learner"]) == (depth > 0)
    [(_, changes)] = followable(run, "admission")
    assert changes["max_staleness"] >= changes["pipeline_depth"] == depth + 1


def test_every_hint_names_settings_that_exist(machine):
    machine(64, gpus=4)
    for recipe in RECIPES.glob("*.toml"):
        for hint in hints(load_run_config(recipe)).values():
            assert named(hint) <= set(keys_of(RunConfig))
            assert "\n" not in hint


def test_a_prm_on_a_card_that_is_not_there_is_refused(machine):
    machine(2)
    with pytest.raises(PreflightError, match="no CUDA GPU"):
        check_before_acting(load_run_config(RECIPES / "prm_cpu.toml", ["prm.device=cuda"]), draws_tasks=False)
