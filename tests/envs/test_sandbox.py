"""Promises of the sandbox to the agent, the trainer and the machine."""

import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from envs.sandbox import Sandbox, SandboxSettings
from envs.sandbox.protocol import (
    BoundedOutput,
    encode_frame,
    find_answer,
    parse_answer,
    parse_reply,
    printable_text,
    split_frame,
)
from envs.types import ToolResult, ToolUnavailableError

_ROOT = Path(__file__).parents[2]


def _wait_until(condition: Callable[[], bool], *, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return met


def _kill(sandbox: Sandbox) -> None:
    """Kill the zygote and wait for its death: a dying zygote could still complete a run."""
    os.kill(sandbox.pid, signal.SIGKILL)
    os.waitid(os.P_PID, sandbox.pid, os.WEXITED | os.WNOWAIT)


# What the agent reads


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("6 * 7", "42\n"),
        ("x = 3\nprint('a')\nx + 1", "a\n4\n"),
        ("x = 3", ""),
        ("None", ""),
        ("    x = 2\n    x * 5", "10\n"),
        ("```python\n2 + 2\n```", "4\n"),
        ("import sympy as sp\nsp.solve(sp.Symbol('x')**2 - 2)", "[-sqrt(2), sqrt(2)]\n"),
        ("import numpy as np\nint(np.arange(5).sum())", "10\n"),
        ("len(str(2**20000))", "6021\n"),
        ("exit()", ""),
        ("print('π ≤ 4')", "π ≤ 4\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nP(1)", "P(x=1)\n"),
    ],
)
def test_code_answers_with_its_output_and_its_last_expression(sandbox: Sandbox, code: str, text: str) -> None:
    assert sandbox.run(code) == ToolResult(text=text)


@pytest.mark.parametrize(
    ("code", "error", "part"),
    [
        ("1/0", "exception", "ZeroDivisionError: division by zero (line 1)"),
        ("x = 1\nprint('before')\ny", "exception", "before\nNameError: name 'y' is not defined (line 3)"),
        ("f(", "syntax", "SyntaxError: '(' was never closed (line 1)"),
        ("a\0b", "syntax", "null byte"),
        ("'\ud800'", "syntax", "surrogate"),
        ("import os", "forbidden-import", "import of 'os' is not allowed; available: bisect"),
        ("from os.path import join", "forbidden-import", "'os'"),
        ("def f():\n    import socket", "forbidden-import", "'socket'"),
        ("bytearray(10**10)", "memory", "MemoryError"),
        ("raise SystemExit(3)", "exception", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "exception", "KeyboardInterrupt"),
        ("input()", "exception", "EOFError"),
        ("__import__('os')._exit(7)", "crashed", "exit code 7"),
        ("__import__('ctypes').string_at(0)", "crashed", "SIGSEGV"),
        ("#" * 70_000, "too-large", "70000 bytes"),
        ("while True: pass", "timeout", "Timed out after 0.5 s."),
        ("while True: print('a' * 100000)", "output", "more than 8 MB"),
    ],
)
def test_mistakes_of_the_code_are_results_with_a_category(sandbox: Sandbox, code: str, error: str, part: str) -> None:
    result = sandbox.run(code, timeout_s=0.5 if error == "timeout" else 20)
    assert result.error == error
    assert part in result.text


# Episodes


def test_each_run_is_fresh_and_an_episode_remembers(sandbox: Sandbox) -> None:
    sandbox.run("x = 5")
    assert sandbox.run("x").error == "exception"
    with sandbox.episode() as episode:
        episode.run("x = 5\nopen('note', 'w').write('kept')")
        assert episode.run("1/0").error == "exception"
        assert episode.run("x, open('note').read()").text == "(5, 'kept')\n"


@pytest.mark.parametrize("killer", ["while True: pass", "__import__('os')._exit(1)"])
def test_an_episode_says_that_a_killed_interpreter_lost_its_names(sandbox: Sandbox, killer: str) -> None:
    with sandbox.episode() as episode:
        episode.run("x = 5")
        assert episode.run(killer, timeout_s=0.5).error in ("timeout", "crashed")
        first, second = episode.run("y = 1\n'defined' if 'x' in globals() else 'gone'"), episode.run("y")
    assert first.text == "[The interpreter was restarted: names from earlier steps are gone.]\n'gone'\n"
    assert second.text == "1\n"


def test_code_that_answers_early_is_stopped_until_the_next_run(sandbox: Sandbox) -> None:
    """The code finds the nonce of its run, forges the answer, and continues to run."""
    forger = """
        import time
        f = __import__('sys')._getframe()
        while 'nonce' not in f.f_locals: f = f.f_back
        body = f.f_locals['nonce'] + b'\\nforged'
        __import__('os').write(4, len(body).to_bytes(4, 'big') + body)
        while True: pass
    """
    with sandbox.episode() as episode:
        assert episode.run(textwrap.dedent(forger)).text == "forged"
        assert _wait_until(
            lambda: "stopped" in [cell.status() for cell in psutil.Process(sandbox.pid).children(recursive=True)]
        )
        assert episode.run("1", timeout_s=0.5).error == "timeout"


def test_an_old_answer_is_not_taken_for_a_new_one(sandbox: Sandbox) -> None:
    body = b"x" * 16 + b"\nforged"
    with sandbox.episode() as episode:
        episode.run(f"__import__('os').write(4, {encode_frame(body)!r})")
        assert episode.run("1 + 1").text == "2\n"


def test_closing_an_episode_ends_its_run_at_once(sandbox: Sandbox) -> None:
    episode = sandbox.episode()
    episode.run("x = 1")
    threading.Timer(0.2, episode.close).start()
    with pytest.raises(ToolUnavailableError, match="closed"):
        episode.run("while True: pass", timeout_s=3600)
    with pytest.raises(ToolUnavailableError, match="closed"):
        episode.run("1")


# Limits and load


def test_sixty_four_episodes_live_side_by_side(sandbox: Sandbox) -> None:
    episodes = [sandbox.episode() for _ in range(64)]
    with ThreadPoolExecutor(64) as threads:
        list(threads.map(lambda numbered: numbered[1].run(f"x = {numbered[0]}"), enumerate(episodes)))
        texts = list(threads.map(lambda episode: episode.run("x").text, episodes))
        list(threads.map(lambda episode: episode.close(), episodes))
    assert texts == [f"{number}\n" for number in range(64)]


def test_many_runs_leave_no_descriptors_processes_or_memory_behind() -> None:
    this = psutil.Process()
    with Sandbox() as sandbox:
        (zygote,) = psutil.Process(sandbox.pid).children()

        def held() -> tuple[int, int]:
            return this.num_fds(), zygote.num_fds()

        # Before the first run, because the zygote lets go of a run only some time after its result came.
        of_this, of_zygote = held()
        sandbox.run("1")
        memory = zygote.memory_info().rss
        for _ in range(100):
            sandbox.run("1")
        # A leak adds one per run; one or two may belong to other activity of this process.
        assert _wait_until(lambda: held()[0] < of_this + 10 and held()[1] <= of_zygote), held()
        assert _wait_until(lambda: not zygote.children())
        assert zygote.memory_info().rss < memory + (4 << 20)


# Faults of the machinery


def test_a_fault_that_loses_names_is_no_result_and_a_dead_zygote_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of names by the sandbox must not be reported as a NameError of the code."""
    with Sandbox() as sandbox, sandbox.episode() as episode:
        episode.run("x = 5")
        processes = psutil.Process(sandbox.pid).children(recursive=True)
        _kill(sandbox)
        psutil.wait_procs(processes, timeout=20)
        with pytest.raises(ToolUnavailableError):
            episode.run("x")
        assert episode.run("1").text.endswith("names from earlier steps are gone.]\n1\n")
        monkeypatch.setattr(sys, "executable", "/bin/false")
        _kill(sandbox)
        with pytest.raises(ToolUnavailableError):
            sandbox.run("1")


def test_layers_are_left_out_only_where_the_others_are_known_to_hold() -> None:
    for tier, disabled in (("auto", "seccomp"), ("landlock", "seccomp"), ("namespaces", "rlimits")):
        with pytest.raises(ValueError):
            SandboxSettings(tier=tier, disabled_layers=(disabled,))


# The tool


# The parts


def test_bounded_output_keeps_both_ends_of_a_flood() -> None:
    output = BoundedOutput()
    output.feed(b"start")
    for _ in range(100):
        output.feed(b"x" * 65536)
    output.feed(b"end")
    text = output.text(100)
    assert text.startswith("startxxx")
    assert text.endswith("xxxend")
    assert f"[{100 * 65536 + 8 - 100} characters left out]" in text


def test_control_characters_become_visible() -> None:
    assert printable_text("a\x1b[2J\tb\r\n\u202e".encode() + b"\xff") == "a\\x1b[2J\tb\n\\u202e\ufffd"


def test_frames_survive_being_split_anywhere() -> None:
    data = encode_frame(b"hello") + encode_frame(b"")
    assert [split_frame(data[:cut]) for cut in range(9)] == [None] * 9
    assert split_frame(data) == (b"hello", encode_frame(b""))
    with pytest.raises(ConnectionError):
        split_frame(b"\xff\xff\xff\xff")


def test_answers_are_believed_only_about_the_code_itself() -> None:
    assert parse_answer(b"syntax\nbad") == ("syntax", "bad")
    assert parse_answer(b"timeout\nfree time")[0] == "exception"
    assert find_answer(encode_frame(b"old-a") + encode_frame(b"new-b"), b"new-") == (b"b", b"")
    assert parse_answer(find_answer(b"\xff" * 70_000, b"new-")[0] or b"")[0] == "exception"
    for unknown in (b"reward|1|0\n1.0", b"|1\n", b"|1|-5\n", b"|1|0|0\n"):
        with pytest.raises(ValueError):
            parse_reply(unknown)
