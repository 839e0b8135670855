import pytest
from ray_jobs.run.deaths import MAX_DEATHS, ONE_EVENT_S, CrashLoopError, Death, Deaths


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def deaths(clock):
    return Deaths(advice="read the logs", clock=clock)


def worker(index, node="a", **options):
    return Death(part=f"rollout worker {index}", reason="it broke", node=node, **options)


def test_many_workers_that_are_lost_with_their_machine_are_one_event(deaths):
    for index in range(64):
        deaths.add(worker(index, fruitless=True))
    assert deaths.total == 64


def test_deaths_in_processes_that_were_cut_off_are_counted_and_are_no_crash_loop():
    counted = []
    deaths = Deaths(advice="read the logs", before=40, counted=counted.append)
    deaths.add(worker(0))
    deaths.add(worker(1))
    assert (deaths.total, counted) == (42, [41, 42])


def test_many_workers_that_had_finished_groups_may_die_one_after_another(deaths, clock):
    for index in range(64):
        clock.now += 10 * ONE_EVENT_S
        deaths.add(worker(index))


def test_one_worker_that_dies_again_and_again_is_a_crash_loop(deaths, clock):
    for _ in range(MAX_DEATHS):
        deaths.add(worker(3))
    with pytest.raises(
        CrashLoopError, match=r"the rollout worker 3 died 6 times .* \(bound 5\): .*it broke; read the logs"
    ):
        deaths.add(worker(3))


def test_workers_that_die_together_before_they_finish_anything_are_a_crash_loop_after_some_rounds(deaths, clock):
    for round_ in range(MAX_DEATHS):
        clock.now = round_ * 60.0
        for index in range(8):
            deaths.add(worker(8 * round_ + index, fruitless=True))
    clock.now += 60.0
    with pytest.raises(CrashLoopError, match="6 times workers died that had finished nothing"):
        deaths.add(worker(99, fruitless=True))


def test_the_same_worker_within_one_event_is_another_event(deaths):
    for _ in range(MAX_DEATHS):
        deaths.add(worker(0, fruitless=True))
    with pytest.raises(CrashLoopError):
        deaths.add(worker(0, fruitless=True))


def test_workers_on_two_machines_die_of_two_causes(deaths, clock):
    for index in range(MAX_DEATHS):
        deaths.add(worker(index, node=f"machine {index}", fruitless=True))
    with pytest.raises(CrashLoopError):
        deaths.add(worker(MAX_DEATHS, node="one more", fruitless=True))


def test_a_train_step_forgets_the_deaths_before_it_and_the_run_counts_them(deaths):
    for _ in range(3):
        for _ in range(MAX_DEATHS):
            deaths.add(worker(0, fruitless=True))
        deaths.progressed()
    assert deaths.total == 3 * MAX_DEATHS


def test_deaths_that_a_group_is_to_blame_for_are_no_crash_loop(deaths):
    for _ in range(4 * MAX_DEATHS):
        deaths.add(worker(0, fruitless=True, explained=True))
    assert deaths.total == 4 * MAX_DEATHS
