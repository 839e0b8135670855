import threading

import pytest

from rollout.engines.engine import Commands, EngineError


def raising(error):
    raise error


def run_waiting(commands):
    commands.run_all(idle=lambda: False)


def test_anything_else_that_is_raised_ends_the_work_and_the_caller_learns_of_it_too():
    commands = Commands()
    broken = commands.submit(lambda: raising(RuntimeError("half replaced")))
    after = commands.submit(lambda: "done")
    with pytest.raises(RuntimeError):
        run_waiting(commands)
    assert isinstance(broken.exception(0), RuntimeError)
    assert not after.done()


def test_of_what_is_handed_in_while_the_thread_ends_each_is_refused():
    commands, refused, start = Commands(), [], threading.Barrier(5)

    def hand_in():
        start.wait(5)
        for _ in range(200):
            with pytest.raises(EngineError):
                commands.submit(lambda: "never").result(5)
            refused.append(1)

    threads = [threading.Thread(target=hand_in) for _ in range(4)]
    for thread in threads:
        thread.start()
    start.wait(5)
    commands.end(EngineError("the engine is closed"))
    for thread in threads:
        thread.join(10)
    assert len(refused) == 800
