from scripted import ScriptedEngine

from rollout.engines.engine import GenerationRequest
from rollout.engines.wrappers import SeededEngine


def request(trajectory_id="bamboogle/1"):
    return GenerationRequest(trajectory_id=trajectory_id, prompt_token_ids=(1,), max_tokens=4, temperature=1.0)


async def seeds_of(seed, trajectory_id="bamboogle/1", calls=2):
    engine = ScriptedEngine(["a"] * calls)
    seeded = SeededEngine(engine, seed)
    for _ in range(calls):
        await seeded.generate(request(trajectory_id))
    seeded.release(trajectory_id)
    assert engine.released == [trajectory_id]
    return [asked.seed for asked in engine.requests]


async def test_every_call_has_a_seed_of_its_own_that_comes_again():
    first = await seeds_of(0)
    assert len(set(first)) == 2
    assert await seeds_of(0) == first
