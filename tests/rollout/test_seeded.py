from collections import Counter, defaultdict

from scripted import ScriptedEngine

from envs.datasets.generated import sample_tasks
from rollout.engines.engine import GenerationRequest
from rollout.engines.wrappers import GIVES_UP, SeededEngine, demonstrated_plans, stream_seed

RUNS, WORKERS = range(64), range(32)


def test_engines_of_different_runs_and_workers_share_no_stream():
    seeds = {(run, worker): stream_seed(run, "engine", worker) for run in RUNS for worker in WORKERS}
    assert len(set(seeds.values())) == len(seeds)
    # numpy takes no other seeds.
    assert all(0 <= seed < 2**32 for seed in seeds.values())


def test_demonstrations_give_up_after_a_first_call_in_the_share_that_was_asked_for():
    tasks = sample_tasks({"lookup": 2.0, "three_lookup": 2.0}, split="train", count=400, seed=0)
    plans, other = (demonstrated_plans(tasks, 0.75, seed=seed) for seed in (5, 6))
    lazy = [plan[-1] == GIVES_UP for plan in plans]
    assert sum(lazy) == 300
    assert lazy != [plan[-1] == GIVES_UP for plan in other]
    ends = defaultdict(Counter)
    for plan, one, ends_early in zip(plans, tasks, lazy, strict=True):
        assert plan[:-1] == one.plan[: len(plan) - 1]
        ends[one.task.dataset][len(plan) - 1] += ends_early
    assert {family: sorted(+counts) for family, counts in ends.items()} == {
        "lookup": [1],
        "three_lookup": [1, 2, 3],
    }


async def test_every_call_of_a_trajectory_has_a_seed_that_depends_on_run_and_task():
    async def seeds_of(seed, name):
        engine = ScriptedEngine(["a"] * 2)
        seeded = SeededEngine(engine, seed)
        for _ in range(2):
            await seeded.generate(
                GenerationRequest(trajectory_id=name, prompt_token_ids=(1,), max_tokens=4, temperature=1.0)
            )
        return [request.seed for request in engine.requests]

    assert await seeds_of(0, "t/1") == await seeds_of(0, "t/1")
    assert len({*await seeds_of(0, "t/1"), *await seeds_of(1, "t/1"), *await seeds_of(0, "t/2")}) == 6
