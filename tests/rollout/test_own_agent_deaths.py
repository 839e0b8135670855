"""Workers that die amid the calls of agents of one's own: no group is lost, none counts twice, no key lives on."""

import asyncio

import openai
import pytest
from endpoint_play import RULES, GatedEngine, new_client, until, user
from scripted import ScriptedTokenizer, make_task

from rollout.agent.custom import CustomAgent
from rollout.buffer import GroupBuffer
from rollout.chat import ChatFormat
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import engine_writers
from rollout.store.admission import BufferSettings, WorkerStatus
from rollout.store.ledger import Ledger
from rollout.store.lifecycle import GroupCounts, GroupResult

RESULT = GroupResult(ending="all_wrong", payload=b"", versions={0: 1}, facts={})
NUM_TASKS, NUM_DEATHS, SIBLINGS = 12, 20, 2


class ScriptedWorker:
    """Plays groups over a scripted engine, which samples once its gate is open; `keys` are those of its attempts."""

    def __init__(self):
        self.engine = GatedEngine(["42"] * 100)
        self.endpoint = Endpoint()
        self.keys = []

    async def answer(self, task, attempt, endpoint):
        self.keys.append(attempt.key)
        async with new_client(endpoint, api_key=attempt.key) as client:
            reply = await client.chat.completions.create(model="policy", messages=[user(task.question)])
        return reply.choices[0].message.content

    async def play(self, permit):
        agent = CustomAgent(
            self,
            self.endpoint,
            writer=engine_writers(self.engine, 0.7),
            chat=ChatFormat(ScriptedTokenizer()),
            rules=RULES,
            timeout_s=3600,
        )
        group = f"{permit.ordinal}.{permit.attempt}"
        names = [f"{group}/{index}" for index in range(SIBLINGS)]
        return await asyncio.gather(*(agent.run(make_task(), trajectory_id=name, group_id=group) for name in names))


async def admit(buffer):
    status = WorkerStatus(worker=0, policy_version=0, running=(), free_places=4)
    return (await buffer.admit(status, patience_s=0)).permits


async def bring(buffer, permits):
    """The groups come back; of a worker that was released that changes nothing."""
    await asyncio.gather(*(buffer.complete(permit.lease, RESULT) for permit in permits))


async def begun(worker, permits):
    """All attempts of the groups, each waiting for its first reply."""
    playing = [asyncio.ensure_future(worker.play(permit)) for permit in permits]
    await until(lambda: len(worker.engine.requests) == SIBLINGS * len(permits))
    return playing


async def test_twenty_deaths_amid_calls_leave_the_ledger_balanced():
    settings = BufferSettings(
        batch_groups=2, pipeline_depth=1, max_attempts=100, max_empty_batches=10**6, max_tasks=NUM_TASKS
    )
    buffer = GroupBuffer(settings, Ledger(), clock=lambda: 0.0)
    keys = []
    for _ in range(NUM_DEATHS):
        worker = ScriptedWorker()
        permits = await admit(buffer)
        for playing in await begun(worker, permits):
            playing.cancel()
            await asyncio.wait((playing,))
        worker.endpoint.close()
        keys += worker.keys
        assert (await buffer.release(0, "its worker was lost")).num_groups == len(permits)
        await bring(buffer, permits)
        assert buffer.counts == GroupCounts(drawn=buffer.counts.drawn, queued=buffer.counts.drawn)
    worker = ScriptedWorker()
    worker.engine.gate.set()
    while permits := await admit(buffer):
        for permit in permits:
            group = await worker.play(permit)
            assert [(len(one.turns), one.answer) for one in group] == [(1, "42")] * SIBLINGS
        await bring(buffer, permits)
    assert buffer.counts == GroupCounts(drawn=NUM_TASKS, all_wrong=NUM_TASKS)
    async with new_client(worker.endpoint, api_key=keys[0]) as client:
        with pytest.raises(openai.AuthenticationError, match="of no attempt here"):
            await client.chat.completions.create(model="policy", messages=[user("1")])
    worker.endpoint.close()
