"""A run's workers as one policy: who gets the next piece, and what a death costs."""

import asyncio
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray

from actors.learner import LearnerCalls
from configs.loading import load_run_config
from envs.types import Task
from ray_jobs.run.actors import NoRoomError
from ray_jobs.run.deaths import CrashLoopError, Death, Deaths
from ray_jobs.run.rollouts import PinnedRollouts, RayRollouts
from ray_jobs.run.supervisor import LearnerLostError, Supervisor, WantedWorkers
from rollout.store.adapters import AdapterMismatchError
from rollout.types import Trajectory

TASKS = [Task(id=f"t{number}", dataset="arith", question="?", answer="1") for number in range(12)]


class FakeWorker:
    """Answers attempts after `pause_s`. `dies_over` ends it: what is open then fails, as what comes later."""

    def __init__(self, pause_s=0.0, dies_over=(), error=ray.exceptions.RayActorError):
        self.pause_s, self.dies_over, self.error = pause_s, dies_over, error
        self.answered, self.open, self.most_open, self.dead = [], 0, 0, False
        self.asked_for = []
        self.attempt = SimpleNamespace(remote=self._attempt)

    async def _attempt(self, task, trajectory_id, **options):
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.asked_for.append(options.get("policy_version"))
        await self._work()
        self.open -= 1
        self.dead = self.dead or task.id in self.dies_over
        if self.dead:
            raise self.error
        self.answered.append(task.id)
        group_id = options["group_id"]
        return Trajectory(id=trajectory_id, group_id=group_id, task=task, turns=(), answer="1", stop_reason="answered")

    async def _work(self):
        await asyncio.sleep(self.pause_s)


class FakeSlowWorker(FakeWorker):
    """Answers when another one has given so many answers."""

    def __init__(self, other, num_answers):
        super().__init__()
        self.other, self.num_answers = other, num_answers

    async def _work(self):
        async with asyncio.timeout(60):
            while len(self.other.answered) < self.num_answers:  # noqa: ASYNC110 (nothing tells of it)
                await asyncio.sleep(0.001)


class FakeActors:
    """`spares` take the places of workers that were lost; without one there is no room. `start_s` is how long one takes
    to start."""

    def __init__(self, workers, spares=(), start_s=0.0):
        self.by_index, self.spares, self.start_s = dict(enumerate(workers)), list(spares), start_s
        self.lost, self.brought_up = [], []
        self.watch = SimpleNamespace(deaths=Deaths(advice="mend it"))
        self.starter = None
        self.faults = []

    @property
    def worker_indices(self):
        return tuple(self.by_index)

    @property
    def workers(self):
        return tuple(self.by_index.values())

    def worker(self, index):
        return self.by_index[index]

    def lose_worker(self, index, error):
        self.lost.append(index)
        del self.by_index[index]
        return Death(part=f"rollout worker {index}", reason="it died")

    def start_worker(self, index):
        if not self.spares:
            raise NoRoomError("no room")
        self.by_index[index] = self.spares.pop(0)

    def bring_up(self, index):
        self.starter = threading.current_thread()
        time.sleep(self.start_s)
        if self.faults:
            raise self.faults.pop()
        self.brought_up.append(index)


def rollouts_over(actors, said=None):
    return RayRollouts(actors, open_each=2, note=[].append if said is None else said.append)


async def attempt_all(rollouts, tasks=TASKS):
    places = asyncio.Semaphore(rollouts.max_open)

    async def attempt(task):
        async with places:
            return await rollouts.attempt(task, task.id, group_id="g", temperature=0.0, seed=0)

    return [one.task.id for one in await asyncio.gather(*map(attempt, tasks))]


async def test_a_slow_worker_holds_nobody_up():
    quick = FakeWorker(0.01)
    slow = FakeSlowWorker(quick, 10)
    assert await attempt_all(rollouts_over(FakeActors([slow, quick]))) == [task.id for task in TASKS]
    assert len(slow.answered) == 2
    assert len(quick.answered) == 10
    assert (slow.most_open, quick.most_open) == (2, 2)


@pytest.mark.parametrize("error", [ray.exceptions.RayActorError(), ray.exceptions.OutOfMemoryError("memory is short")])
async def test_a_workers_death_costs_only_what_it_had_open(error):
    """Regression: where Ray ends a worker because the machine's memory is short, its error is of another kind."""
    dying = FakeWorker(0.01, dies_over=("t0",), error=error)
    other, spare = FakeWorker(0.01), FakeWorker(0.01)
    actors, said = FakeActors([dying, other], [spare]), []
    assert await attempt_all(rollouts_over(actors, said)) == [task.id for task in TASKS]
    assert (actors.lost, actors.brought_up) == ([0], [0])
    answered = [*dying.answered, *other.answered, *spare.answered]
    assert sorted(answered) == sorted(task.id for task in TASKS)
    assert said == ["the rollout worker 0 was lost and is replaced (it died)"]


async def test_the_only_worker_is_replaced_once_for_all_who_lost_it():
    spare = FakeWorker()
    actors = FakeActors([FakeWorker(0.01, dies_over=("t0",))], [spare], start_s=0.05)
    await attempt_all(rollouts_over(actors))
    assert (actors.lost, actors.watch.deaths.total) == ([0], 1)
    assert actors.starter is not threading.current_thread()


async def test_successor_that_does_not_take_up_the_newest_weights_is_replaced_as_well():
    actors = FakeActors([FakeWorker(0.01, dies_over=("t0",))], [FakeWorker(0.01), FakeWorker(0.01)])
    actors.faults = [AdapterMismatchError("a rollout worker did not take up version 3 within 300 s")]
    assert await attempt_all(rollouts_over(actors)) == [task.id for task in TASKS]
    assert (actors.lost, actors.brought_up) == ([0, 0], [0])


async def test_workers_that_answered_before_they_died_are_no_crash_loop(monkeypatch):
    """Regression: the store knows of groups for training alone, so that six workers of preemptible machines that were
    lost over hours ended the collecting, however much each had answered."""
    seconds = iter(range(0, 10_000, 60))
    dying = [FakeWorker(0.01, dies_over=(f"t{number}",)) for number in range(7)]
    actors = FakeActors(dying, [FakeWorker(0.01) for _ in range(7)])
    actors.watch.deaths = Deaths(advice="mend it", clock=lambda: float(next(seconds)))
    monkeypatch.setattr(FakeActors, "lose_worker", fruitless(FakeActors.lose_worker))
    rollouts = rollouts_over(actors)
    for number, worker in enumerate(dying):
        actors.by_index = {number: worker}
        await attempt_all(rollouts, [*TASKS[7:], TASKS[number]])
    assert actors.watch.deaths.total == 7


async def test_workers_that_die_before_they_answered_anything_are_a_crash_loop(monkeypatch):
    seconds = iter(range(0, 10_000, 60))
    dying = [FakeWorker(0.01, dies_over=("t0",)) for _ in range(7)]
    actors = FakeActors(dying)
    actors.watch.deaths = Deaths(advice="mend it", clock=lambda: float(next(seconds)))
    monkeypatch.setattr(FakeActors, "lose_worker", fruitless(FakeActors.lose_worker))
    with pytest.raises(CrashLoopError, match="6 times workers died that had finished nothing"):
        await attempt_all(rollouts_over(actors), TASKS[:1])


def fruitless(lose_worker):
    """As the store says of a worker that has finished no group for training."""
    return lambda *arguments: replace(lose_worker(*arguments), fruitless=True)


async def test_without_room_for_another_the_others_go_on_alone():
    other, said = FakeWorker(0.01), []
    actors = FakeActors([FakeWorker(0.01, dies_over=("t0",)), other])
    await attempt_all(rollouts_over(actors, said))
    assert len(other.answered) == 12
    assert "going on without rollout worker 0: no room" in said


async def test_with_nobody_left_the_phase_ends_with_the_reason():
    actors = FakeActors([FakeWorker(0.01, dies_over=("t0",))])
    with pytest.raises(NoRoomError):
        await asyncio.wait_for(attempt_all(rollouts_over(actors)), 10)


async def test_a_task_that_ends_every_worker_ends_the_phase_as_a_crash_loop():
    spares = [FakeWorker(dies_over=("t0",)) for _ in range(20)]
    rollouts = rollouts_over(FakeActors([FakeWorker(dies_over=("t0",))], spares))
    with pytest.raises(CrashLoopError, match="the rollout worker 0 died 6 times"):
        await attempt_all(rollouts, TASKS[:1])


def pinned_over(actors):
    return PinnedRollouts(actors, open_each=2, note=[].append, policy_version=7)


async def test_while_training_every_attempt_is_asked_for_with_the_one_version():
    one, other = FakeWorker(0.01), FakeWorker(0.01)
    await attempt_all(pinned_over(FakeActors([one, other])))
    assert one.asked_for + other.asked_for == [7] * 12


async def test_while_training_a_worker_that_died_is_left_to_the_supervisor_and_what_it_had_open_is_asked_again():
    dying, other, spare = FakeWorker(0.01, dies_over=("t0",)), FakeWorker(0.05), FakeWorker(0.01)
    actors = FakeActors([dying, other])
    attempts = asyncio.create_task(attempt_all(pinned_over(actors)))
    await asyncio.sleep(0.1)
    actors.by_index[0] = spare
    assert await attempts == [task.id for task in TASKS]
    assert actors.lost == []
    assert sorted(dying.answered + other.answered + spare.answered) == sorted(task.id for task in TASKS)
    assert spare.answered


async def test_while_training_nobody_is_there_for_a_moment_and_the_attempts_wait():
    actors = FakeActors([])
    attempts = asyncio.create_task(attempt_all(pinned_over(actors), TASKS[:3]))
    await asyncio.sleep(0.05)
    actors.by_index[0] = FakeWorker()
    assert len(await asyncio.wait_for(attempts, 10)) == 3


async def test_while_training_attempts_end_with_the_loop_that_would_have_replaced_their_worker():
    rollouts = pinned_over(FakeActors([FakeWorker(0.01, dies_over=("t0",))]))
    attempts = asyncio.create_task(attempt_all(rollouts))
    await asyncio.sleep(0.05)
    rollouts.end(NoRoomError("no room"))
    with pytest.raises(NoRoomError):
        await asyncio.wait_for(attempts, 10)


def test_workers_file_says_how_many_are_wanted_until_it_is_gone(tmp_path):
    path, said = tmp_path / "workers", []
    wanted = WantedWorkers(path, 2, said.append)
    assert wanted.read() == 2
    path.write_text("5\n")
    assert wanted.read() == 5
    path.unlink()
    assert (wanted.read(), said) == (2, [])


@pytest.mark.parametrize("text", ["three", "0", "-1", "2.5", "\x00"])
def test_workers_file_without_a_number_is_told_once_and_changes_nothing(tmp_path, text):
    path, said = tmp_path / "workers", []
    wanted = WantedWorkers(path, 2, said.append)
    path.write_text("5")
    assert wanted.read() == 5
    path.write_text(text)
    assert [wanted.read() for _ in range(3)] == [5] * 3
    assert said == [f"{path} says {text!r}, not a whole number of at least 1: 5 workers as before"]
    path.write_text("1")
    assert wanted.read() == 1


def test_workers_file_that_is_being_written_or_cannot_be_read_changes_nothing_and_is_not_told(tmp_path):
    path, said = tmp_path / "workers", []
    wanted = WantedWorkers(path, 2, said.append)
    path.write_text("5")
    assert wanted.read() == 5
    path.write_text("")
    assert wanted.read() == 5
    path.unlink()
    path.mkdir()
    assert (wanted.read(), said) == (5, [])


@pytest.fixture
def supervisor(tmp_path):
    """Without workers."""
    watch = SimpleNamespace(deaths=Deaths(advice="mend it"), call=lambda *_: nullcontext())
    learner = {"learner": None, "learner_call": lambda method: "the call"}
    return Supervisor(
        SimpleNamespace(
            actors=SimpleNamespace(watch=watch, prm_digest=None, **learner),
            console=SimpleNamespace(waiting=lambda what: nullcontext(), note=[].append),
            config=load_run_config(None, []),
            folder=SimpleNamespace(wanted_workers=tmp_path / "workers"),
        )
    )


def test_loop_returns_and_raises_what_is_done_beside_it(supervisor):
    policy = pinned_over(FakeActors([FakeWorker()]))
    assert supervisor.beside(policy, lambda: asyncio.run(attempt_all(policy, TASKS[:2])), "them") == ["t0", "t1"]
    with pytest.raises(ZeroDivisionError):
        supervisor.beside(policy, lambda: 1 / 0, "them")


def test_loop_that_ends_does_not_wait_for_attempts_whose_worker_nobody_will_replace(supervisor, monkeypatch):
    def ends():
        raise NoRoomError("no room")

    monkeypatch.setattr(supervisor, "_tend", ends)
    policy = pinned_over(FakeActors([FakeWorker(dies_over=("t0",))]))
    with pytest.raises(NoRoomError):
        supervisor.beside(policy, lambda: asyncio.run(attempt_all(policy, TASKS[:2])), "them")


def test_learner_is_lost_where_its_own_call_fails_and_not_where_the_store_is_dead(supervisor, monkeypatch):
    """Regression: a store that was gone for good cost six learners, and the message blamed them."""
    dead = ray.exceptions.ActorDiedError()

    def fail(*_):
        raise dead

    monkeypatch.setattr("ray_jobs.run.supervisor.ray", SimpleNamespace(get=fail, wait=lambda one, **_: (one, [])))
    monkeypatch.setattr(supervisor, "_tend", lambda: None)
    with pytest.raises(LearnerLostError):
        supervisor.learn(LearnerCalls.begin_imitation)
    monkeypatch.setattr(supervisor, "_tend", fail)
    with pytest.raises(ray.exceptions.ActorDiedError):
        supervisor.learn(LearnerCalls.begin_imitation)


def test_more_workers_than_a_memory_on_disk_serves_are_told_and_not_started(tmp_path):
    """Regression: the second one could not open the folder, and died until the run ended."""
    path, said = tmp_path / "workers", []
    wanted = WantedWorkers(path, 1, said.append, most=1)
    path.write_text("2\n")
    assert (wanted.read(), wanted.read()) == (1, 1)
    assert len(said) == 1
    assert "says 2, and agent.memory.type = 'folder' is for 1 rollout worker: 1 as before" in said[0]
