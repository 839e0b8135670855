"""An agent of one's own, a function or a program: its calls are the turns, its failures are told and score nothing."""

import asyncio
import gc
import json
import os
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from endpoint_play import RULES, GatedEngine
from scripted import ScriptedEngine, ScriptedTokenizer, make_task, text_of

from configs.rollout import FunctionAgentConfig
from rollout.agent.custom import CustomAgent, Program, command_solving, function_solving
from rollout.chat import ChatFormat
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import engine_writers

FUNCTIONS = """
import asyncio
import time

async def solve(task, client):
    messages = [{"role": "user", "content": task.question}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    messages += [reply.choices[0].message, {"role": "user", "content": "Sure?"}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return reply.choices[0].message.content

async def raises(task, client):
    raise KeyError("x")

async def gives_none(task, client):
    return None

def wraps(task, client):
    return gives_none(task, client)

async def never_ends(task, client):
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        await asyncio.sleep(3600)

async def fails_late(task, client):
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        raise RuntimeError("too late")

async def repeats(task, client):
    for _ in range(999):
        try:
            reply = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "again"}]
            )
        except Exception as error:
            refused = error
    raise refused

def gives_up(task, client):
    while True:
        try:
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "again"}])
        except Exception as error:
            return type(error).__name__

async def is_refused(task, client):
    while True:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "again"}])

async def asks_side_by_side(task, client):
    await asyncio.gather(*(repeats(task, client) for _ in range(3)))

async def tells_its_key(task, client):
    raise RuntimeError("503 for https://x/?q=1&appid=key+of+mine-123")

async def knows(task, client):
    await solve(task, client)
    return repr(task)

async def overflows(task, client):
    question = "x" * 5000
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])

async def cancels(task, client):
    waiting = asyncio.ensure_future(asyncio.sleep(3600))
    waiting.cancel()
    await waiting

async def exits(task, client):
    raise SystemExit("enough")

def exits_its_thread(task, client):
    raise SystemExit("enough")

def sleeps(task, client):
    time.sleep(3600)
"""
PROGRAM = """
import http.client, json, os, sys, urllib.parse

task = json.load(sys.stdin)

def post(path, body):
    where = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(where.netloc)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection.request("POST", where.path + path, json.dumps(body), headers)
    return json.load(connection.getresponse())

def ask(text):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    return post("/chat/completions", body)["choices"][0]["message"]["content"]

said = ask(task["question"])
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "agents_of_a_test.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda name: function_solving(FunctionAgentConfig(function=f"agents_of_a_test:{name}"))
    sys.modules.pop("agents_of_a_test", None)


@pytest.fixture
def program(tmp_path):
    def written(ending, start=PROGRAM):
        path = tmp_path / "agent.py"
        path.write_text(start + textwrap.dedent(ending))
        return command_solving(Program("python agent.py", str(tmp_path)), "policy")

    return written


async def attempt(solve, *texts, timeout_s=60.0, told=None, engine=None, wall_timeout_s=60.0):
    endpoint = Endpoint()
    agent = CustomAgent(
        solve,
        endpoint,
        writer=engine_writers(engine or ScriptedEngine(texts), 0.7),
        chat=ChatFormat(ScriptedTokenizer()),
        rules=RULES,
        timeout_s=timeout_s,
        wall_timeout_s=wall_timeout_s,
    )
    trajectory = await agent.run(make_task(), trajectory_id="g/0", group_id="g", on_turn=told)
    endpoint.close()
    return trajectory


async def failure_of(*arguments, **settings):
    trajectory = await attempt(*arguments, **settings)
    assert (trajectory.stop_reason, trajectory.answer) == ("infrastructure", None)
    assert "\n" not in trajectory.failure
    return trajectory.failure


async def test_the_calls_of_a_function_are_the_turns_of_one_dialogue_that_only_grows(functions):
    heard = []
    trajectory = await attempt(functions("solve"), "41", "42", told=heard.append)
    assert (trajectory.answer, trajectory.stop_reason, trajectory.failure) == ("42", "answered", None)
    assert trajectory.branches == ((0, 1),)
    assert text_of(trajectory.turns[1].prompt_token_ids) == (
        "<s>user:What is 6*7?<e><s>assistant:41<e><s>user:Sure?<e><s>assistant:"
    )
    assert tuple(heard) == trajectory.turns


async def test_an_agent_is_not_told_the_answer(functions):
    told = (await attempt(functions("knows"), "1", "2")).answer
    assert told == "GivenTask(id='task-1', dataset='arith', question='What is 6*7?')"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("raises", "KeyError"), ("exits", "SystemExit"), ("exits_its_thread", "SystemExit")),
        *(("cancels", "agent"), ("gives_none", "NoneType"), ("wraps", "coroutine")),
    ],
)
async def test_a_function_that_fails_is_reported_in_one_line_and_scores_nothing(functions, name, kind):
    assert kind in await failure_of(functions(name))


async def test_a_key_in_an_error_is_not_written_down(functions, monkeypatch):
    monkeypatch.setenv("WEATHER_API_KEY", "key of mine-123")
    said = await failure_of(functions("tells_its_key"), "1")
    assert "mine-123" not in said
    assert "appid=[WEATHER_API_KEY]" in said


@pytest.mark.parametrize("name", ["never_ends", "sleeps"])
async def test_a_function_that_ignores_its_time_limit_is_left_behind(functions, name, monkeypatch):
    monkeypatch.setattr("rollout.agent.custom.GRACE_S", 0.1)
    assert "rollout.episode_timeout_s" in await failure_of(functions(name), timeout_s=0.2)


@pytest.mark.parametrize("name", ["repeats", "is_refused", "asks_side_by_side"])
async def test_an_agent_that_never_stops_asking_ended_so_and_is_scored(functions, name, monkeypatch):
    monkeypatch.setattr("rollout.agent.custom.GRACE_S", 0.2)
    trajectory = await attempt(functions(name), *"a" * 99)
    assert (trajectory.stop_reason, trajectory.answer, trajectory.failure) == ("calls", None, None)
    assert len(trajectory.turns) == RULES.max_calls


async def test_an_agent_that_is_refused_a_further_call_may_answer(functions):
    trajectory = await attempt(functions("gives_up"), *"a" * 99)
    assert (trajectory.stop_reason, trajectory.answer) == ("answered", "PermissionDeniedError")


async def test_an_agent_that_fails_late_logs_nothing_more(functions):
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    assert "rollout.episode_timeout_s" in await failure_of(functions("fails_late"), timeout_s=0.1)
    gc.collect()
    await asyncio.sleep(0)
    assert told == []


async def test_an_engine_that_works_for_ever_ends_an_attempt_at_its_wall_time(functions):
    assert "rollout.wall_timeout_s" in await failure_of(functions("solve"), engine=GatedEngine("a"), wall_timeout_s=0.3)


async def test_an_agent_that_fails_over_a_full_context_ended_so_and_is_scored(functions):
    trajectory = await attempt(functions("overflows"), "1")
    assert (trajectory.stop_reason, trajectory.answer, trajectory.failure) == ("context", None, None)


async def test_the_answer_of_a_program_is_the_last_line_that_it_prints(program):
    trajectory = await attempt(program("print('thinking')\nprint(said)\nprint()"), "42")
    assert (trajectory.answer, trajectory.stop_reason) == ("42", "answered")
    assert text_of(trajectory.turns[0].prompt_token_ids) == "<s>user:What is 6*7?<e><s>assistant:"


async def test_a_program_that_has_posted_its_answer_is_not_waited_for_and_ends_with_all_that_it_started(
    program, tmp_path
):
    note = tmp_path / "pids"
    lingers = f"""
        import subprocess, time
        child = subprocess.Popen(["sleep", "600"])
        open({str(note)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
        post("/answer", {{"answer": said}})
        time.sleep(600)
    """
    trajectory = await attempt(program(lingers), "42", timeout_s=20)
    assert (trajectory.answer, trajectory.stop_reason, trajectory.failure) == ("42", "answered", None)
    assert_gone(note)
    assert not {"Program.run", "Event.wait"} & {one.get_coro().__qualname__ for one in asyncio.all_tasks()}


@pytest.mark.parametrize("ending", ["raise SystemExit('no luck')", "os.kill(os.getpid(), 15)", ""])
async def test_a_program_that_fails_is_reported_in_one_line_and_scores_nothing(program, ending):
    assert await failure_of(program(ending), "42")


async def test_a_daemon_that_left_its_process_group_ends_with_the_attempt(program, tmp_path):
    note = tmp_path / "pids"
    daemon = f"""
        import time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                open({str(note)!r}, "w").write(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
        while not (os.path.exists({str(note)!r}) and open({str(note)!r}).read()):
            time.sleep(0.01)
        print(said)
    """
    assert (await attempt(program(daemon), "42")).answer == "42"
    assert_gone(note)


async def test_a_program_knows_no_secret_but_its_own_key_and_has_a_folder_to_itself(program, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    told = "open('left', 'w').write('x')\nprint(json.dumps([dict(os.environ), os.getcwd(), os.listdir('.')]))"
    first, second = [json.loads((await attempt(program(told), "1")).answer) for _ in range(2)]
    assert "secret" not in str(first)
    assert set(first[0]) <= {
        *("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
        *("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
    }
    assert first[0]["HOME"] == first[0]["TMPDIR"] == first[1] != second[1]
    assert (first[2], second[2]) == (["left"], ["left"])
    assert Path(first[1]).parent.name not in os.listdir(tempfile.gettempdir())


def assert_gone(note):
    for pid in map(int, note.read_text().split()):
        deadline = time.monotonic() + 20
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive(pid)


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
