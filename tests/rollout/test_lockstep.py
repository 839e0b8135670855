import asyncio

from scripted import ScriptedEngine

from rollout.engine import GenerationRequest
from rollout.lockstep import LockstepEngine


class ScriptedBatchEngine(ScriptedEngine):
    def __init__(self):
        super().__init__([])
        self.batches = []

    async def generate_together(self, requests):
        self.batches.append([request.trajectory_id for request in requests])
        self.texts = ["x"] * len(requests)
        return [await self.generate(request) for request in requests]


def ask(trajectory_id):
    return GenerationRequest(trajectory_id=trajectory_id, prompt_token_ids=(1,), max_tokens=1, temperature=1.0)


async def test_batches_are_the_same_whoever_asks_first():
    seen = []
    for order in (["a", "b", "c"], ["c", "a", "b"]):
        engine = ScriptedBatchEngine()
        lockstep = LockstepEngine(engine)
        lockstep.begin_round(3)

        async def play(name, delay, lockstep=lockstep):
            for _ in range(2):
                await asyncio.sleep(delay)
                await lockstep.generate(ask(name))
            lockstep.release(name)

        await asyncio.gather(*(play(name, 0.002 * place) for place, name in enumerate(order)))
        seen.append(engine.batches)
    assert seen == [[["a", "b", "c"]] * 2] * 2


async def test_trajectory_that_ends_no_longer_holds_the_others_up():
    engine = ScriptedBatchEngine()
    lockstep = LockstepEngine(engine)
    lockstep.begin_round(2)
    waiting = asyncio.create_task(lockstep.generate(ask("a")))
    await asyncio.sleep(0)
    assert not waiting.done()
    lockstep.release("b")
    await waiting
    assert engine.batches == [["a"]]
