from collections import defaultdict

from scripted import ScriptedEngine

from envs.datasets.families import FAMILIES
from envs.datasets.generated import sample_tasks
from rollout.engines.engine import GenerationRequest
from rollout.engines.wrappers import GIVES_UP, SeededEngine, demonstrated_plans


def test_demonstrations_give_up_after_a_first_call_in_the_share_of_each_family_and_evenly_spread():
    tasks = sample_tasks({"lookup": 2.0, "three_lookup": 2.0}, split="train", count=400, seed=0)
    ends = defaultdict(list)
    for plan, one in zip(demonstrated_plans(tasks, 0.75), tasks, strict=True):
        assert plan[:-1] == one.plan[: len(plan) - 1]
        ends[one.task.dataset].append(len(plan) - 1 if plan[-1] == GIVES_UP else 0)
    for family, lengths in ends.items():
        assert sum(map(bool, lengths)) == 150
        assert all(14 <= sum(map(bool, lengths[start : start + 20])) <= 16 for start in range(180))
        assert sorted({*lengths} - {0}) == ([1] if family == "lookup" else [1, 2, 3])


def test_giving_up_begins_like_no_step_of_a_plan():
    tasks = sample_tasks(dict.fromkeys(FAMILIES, 1.0), split="train", count=100, seed=0)
    assert GIVES_UP.thought.split()[0] not in {step.thought.split()[0] for one in tasks for step in one.plan}


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
