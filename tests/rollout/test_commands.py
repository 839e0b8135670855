import threading
from types import SimpleNamespace

import pytest

from rollout.engines.engine import Commands, EngineError
from rollout.engines.vllm import VllmEngine


def raising(error):
    raise error


def run_waiting(commands):
    commands.run_all(idle=lambda: False)


def test_work_is_done_in_the_order_in_which_it_was_handed_in():
    commands, done = Commands(), []
    futures = [commands.submit(lambda number=number: done.append(number) or number) for number in range(3)]
    assert done == []
    run_waiting(commands)
    assert done == [0, 1, 2]
    assert [future.result(0) for future in futures] == [0, 1, 2]


def test_work_that_was_cancelled_before_its_turn_is_left_out():
    commands, done = Commands(), []
    cancelled = commands.submit(lambda: done.append("cancelled"))
    commands.submit(lambda: done.append("kept"))
    assert cancelled.cancel()
    run_waiting(commands)
    assert done == ["kept"]


def test_refusal_goes_to_the_caller_and_the_work_goes_on():
    commands = Commands()
    refused = commands.submit(lambda: raising(ValueError("not newer")))
    after = commands.submit(lambda: "done")
    run_waiting(commands)
    assert isinstance(refused.exception(0), ValueError)
    assert after.result(0) == "done"


def test_anything_else_that_is_raised_ends_the_work_and_the_caller_learns_of_it_too():
    commands = Commands()
    broken = commands.submit(lambda: raising(RuntimeError("half replaced")))
    after = commands.submit(lambda: "done")
    with pytest.raises(RuntimeError):
        run_waiting(commands)
    assert isinstance(broken.exception(0), RuntimeError)
    assert not after.done()


def test_after_the_end_nobody_waits_in_vain():
    commands = Commands()
    waiting = commands.submit(lambda: "never")
    commands.end(EngineError("the engine is closed"))
    with pytest.raises(EngineError):
        waiting.result(0)
    with pytest.raises(EngineError):
        commands.submit(lambda: "never")


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


async def test_adapter_is_hashed_and_checked_without_the_engines_thread():
    """Nobody does here what is handed in: decoding that takes for ever holds up no preparation."""
    engine = VllmEngine.__new__(VllmEngine)
    engine._native, engine._commands = None, Commands()
    engine._merger = SimpleNamespace(merged_weights=lambda adapter: iter([("w", adapter)]))
    prepared = await engine.prepare_adapter(3, b"abc")
    assert prepared.digest == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert (prepared.version, list(prepared.weights)) == (3, [("w", b"abc")])
