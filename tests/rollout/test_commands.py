import threading
from types import SimpleNamespace

import pytest

from rollout.engines.engine import Commands, EngineError
from rollout.engines.vllm import VllmEngine


def raising(error):
    raise error


def run_waiting(commands):
    commands.run_all(idle=lambda: False)


def test_work_is_done_in_order_and_cancelled_work_is_left_out():
    commands, done = Commands(), []
    futures = [commands.submit(lambda number=number: done.append(number) or number) for number in range(4)]
    assert futures[1].cancel()
    assert done == []
    run_waiting(commands)
    assert done == [0, 2, 3]
    assert [futures[number].result(0) for number in done] == done


def test_value_error_goes_to_the_caller_only():
    commands = Commands()
    refused = commands.submit(lambda: raising(ValueError("not newer")))
    after = commands.submit(lambda: "done")
    run_waiting(commands)
    assert isinstance(refused.exception(0), ValueError)
    assert after.result(0) == "done"


def test_any_other_error_ends_the_work_and_goes_to_the_caller_too():
    commands = Commands()
    broken = commands.submit(lambda: raising(RuntimeError("half replaced")))
    after = commands.submit(lambda: "done")
    with pytest.raises(RuntimeError):
        run_waiting(commands)
    assert isinstance(broken.exception(0), RuntimeError)
    assert not after.done()


def test_idle_thread_sleeps_until_work_is_submitted():
    commands, done = Commands(), []
    thread = threading.Thread(target=commands.run_all, kwargs={"idle": lambda: not done}, daemon=True)
    thread.start()
    assert commands.submit(lambda: done.append(1) or "woken").result(5) == "woken"
    thread.join(5)
    assert not thread.is_alive()


def test_work_that_is_submitted_while_the_thread_ends_is_refused():
    commands, refused, start = Commands(), [], threading.Barrier(5)
    cancelled = commands.submit(lambda: 1)
    cancelled.cancel()

    def submit():
        start.wait(5)
        for _ in range(200):
            with pytest.raises(EngineError):
                commands.submit(lambda: "never").result(5)
            refused.append(1)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    start.wait(5)
    failure = RuntimeError("out of memory")
    stopped = EngineError("the engine stopped")
    stopped.__cause__ = failure
    commands.end(stopped)
    for thread in threads:
        thread.join(10)
    assert len(refused) == 800
    with pytest.raises(EngineError) as error:
        commands.submit(lambda: "never")
    assert error.value.__cause__ is failure


async def test_adapter_is_hashed_and_checked_without_the_engines_thread():
    engine = VllmEngine.__new__(VllmEngine)
    engine._native, engine._commands = None, Commands()
    engine._merger = SimpleNamespace(merged_weights=lambda adapter: iter([("w", adapter)]))
    prepared = await engine.prepare_adapter(3, b"abc")
    assert (prepared.version, next(prepared.weights)) == (3, ("w", b"abc"))
