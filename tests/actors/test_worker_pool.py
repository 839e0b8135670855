"""The rollout workers as one policy: which worker gets the next call, and what a death costs."""

import asyncio
from types import SimpleNamespace

import pytest
import ray

from actors import rollout_worker
from actors.rollout_worker import WorkerPool
from configs.errors import UserError
from envs.types import Task

TASKS = [Task(id=f"t{number}", dataset="lookup", question="?", answer="1") for number in range(12)]


class FakeWorker:
    """Answers attempts after `pause_s`. It dies over the tasks of `dies_over`, with all that it has open."""

    def __init__(self, pause_s=0.0, dies_over=(), error=ray.exceptions.RayActorError):
        self.pause_s, self.dies_over, self.error = pause_s, dies_over, error
        self.answered, self.open, self.most_open, self.is_dead, self.versions = [], 0, 0, False, set()
        self.act = SimpleNamespace(remote=self._act)

    async def _act(self, version, method, task, trajectory_id, **_):
        assert method == "attempt"
        self.versions.add(version)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(self.pause_s)
        self.open -= 1
        self.is_dead = self.is_dead or task.id in self.dies_over
        if self.is_dead:
            raise self.error
        self.answered.append(task.id)
        return trajectory_id


class FakeSupervisor:
    def __init__(self, *workers):
        self.workers, self.failure = dict(enumerate(workers)), None

    def check(self):
        if self.failure:
            raise self.failure


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(rollout_worker, "POOL_LOOK_EVERY_S", 0.01)


async def attempt_all(supervisor, version=7):
    pool = WorkerPool(supervisor, max_open_each=2)
    pool.policy_version = version
    places = asyncio.Semaphore(pool.max_open)

    async def attempt(task):
        async with places:
            return await pool.attempt(task, task.id, group_id="g", temperature=0.0, seed=0)

    async with asyncio.timeout(30):
        return await asyncio.gather(*map(attempt, TASKS))


async def test_slow_worker_holds_nothing_up():
    quick, slow = FakeWorker(0.005), FakeWorker(0.2)
    assert await attempt_all(FakeSupervisor(slow, quick)) == [task.id for task in TASKS]
    assert len(quick.answered) > len(slow.answered)
    assert (slow.most_open, quick.most_open) == (2, 2)
    assert slow.versions == quick.versions == {7}


@pytest.mark.parametrize("error", [ray.exceptions.RayActorError(), ray.exceptions.OutOfMemoryError("memory is short")])
async def test_death_of_a_worker_costs_what_it_had_open(error):
    dying, other = FakeWorker(0.01, dies_over=("t0",), error=error), FakeWorker(0.01)
    assert await attempt_all(FakeSupervisor(dying, other)) == [task.id for task in TASKS]
    assert sorted(dying.answered + other.answered) == sorted(task.id for task in TASKS)


@pytest.mark.parametrize("ends", [False, True])
async def test_calls_wait_for_the_replacement_of_the_only_worker_or_for_what_ends_the_run(ends):
    supervisor = FakeSupervisor(FakeWorker(0.01, dies_over=("t0",)))
    attempts = asyncio.create_task(attempt_all(supervisor))
    await asyncio.sleep(0.1)
    assert not attempts.done()
    if ends:
        supervisor.failure = UserError("lost")
        with pytest.raises(UserError):
            await attempts
    else:
        supervisor.workers[0] = FakeWorker()
        assert await attempts == [task.id for task in TASKS]
