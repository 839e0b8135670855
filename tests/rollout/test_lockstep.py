import asyncio

from scripted import ScriptedEngine

from rollout.engines.engine import GenerationRequest
from rollout.engines.wrappers import LockstepEngine


class ScriptedBatchEngine(ScriptedEngine):
    def __init__(self):
        super().__init__([])
        self.batches = []
        self.seeds = []
        self.forgotten = []

    async def forget_prefixes(self):
        self.forgotten.append(len(self.batches))

    async def generate_together(self, requests):
        self.batches.append([request.trajectory_id for request in requests])
        self.seeds += [request.seed for request in requests]
        self.texts = ["x"] * len(requests)
        return [await self.generate(request) for request in requests]


def ask(trajectory_id, prompt=(1,)):
    return GenerationRequest(trajectory_id=trajectory_id, prompt_token_ids=prompt, max_tokens=1, temperature=1.0)


async def test_batches_are_the_same_whoever_asks_first():
    seen = []
    for order in (["a", "b", "c"], ["c", "a", "b"]):
        engine = ScriptedBatchEngine()
        lockstep = LockstepEngine(engine, seed=0)
        lockstep.begin_round(3)

        async def play(name, delay, lockstep=lockstep):
            for _ in range(2):
                await asyncio.sleep(delay)
                await lockstep.generate(ask(name))
            lockstep.release(name)

        await asyncio.gather(*(play(name, 0.002 * place) for place, name in enumerate(order)))
        seen.append(engine.batches)
    assert seen == [[["a", "b", "c"]] * 2] * 2


async def test_every_round_begins_with_an_empty_prefix_cache():
    """Regression: a run that was cut off between its evaluation and its first step ended with other bytes, because a
    prompt whose beginning is cached is computed in another shape, and so is a round that is played again."""
    engine = ScriptedBatchEngine()
    lockstep = LockstepEngine(engine, seed=0)
    for _ in range(2):
        lockstep.begin_round(1)
        await lockstep.generate(ask("a"))
        await lockstep.generate(ask("a", (1, 2)))
        lockstep.release("a")
    assert engine.forgotten == [0, 2]


async def test_each_call_has_a_seed_of_its_own_that_is_the_same_in_every_run():
    async def seeds_of(seed):
        """Asked one after the other, each in a batch of its own."""
        engine = ScriptedBatchEngine()
        lockstep = LockstepEngine(engine, seed=seed)
        lockstep.begin_round(1)
        for request in (ask("a"), ask("a", (1, 2)), ask("b"), ask("b", (1, 2))):
            await lockstep.generate(request)
        return engine.seeds

    seeds = await seeds_of(0)
    assert len(set(seeds)) == 4
    assert seeds == await seeds_of(0)
    assert not set(seeds) & set(await seeds_of(1))
