"""An agent of one's own, a function or a program: its calls are the turns, its failures are told and score nothing."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from endpoint_play import RULES, GatedEngine
from scripted import ScriptedEngine, ScriptedTokenizer, make_task, text_of

from configs.rollout import CommandAgentConfig, FunctionAgentConfig, RolloutConfig
from envs import kernel
from reward.scorers import outcome_of
from rollout.agent.custom import CustomAgent, command_solving, function_solving
from rollout.chat import ChatFormat
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import engine_writers

FUNCTIONS = """
import asyncio
import time
from envs.types import ToolUnavailableError

async def ask(client, text="again"):
    messages = [{"role": "user", "content": text}]
    return await client.chat.completions.create(model="policy", messages=messages)

async def solve(task, client):
    messages = [{"role": "user", "content": task.question}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    messages += [reply.choices[0].message, {"role": "user", "content": "Sure?"}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return reply.choices[0].message.content

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
            await ask(client)
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
        await ask(client)

async def fails_once_it_is_refused(task, client):
    try:
        await is_refused(task, client)
    except Exception:
        raise ToolUnavailableError("down")

async def quotes_the_refusal(task, client):
    try:
        await is_refused(task, client)
    except Exception as error:
        raise ToolUnavailableError(f"upstream: {error}")

async def asks_side_by_side(task, client):
    await asyncio.gather(*(repeats(task, client) for _ in range(3)))

async def counts_replies(task, client):
    replies = await asyncio.gather(*(ask(client, str(number)) for number in range(9)), return_exceptions=True)
    return str(sum(not isinstance(reply, Exception) for reply in replies))

async def tells_its_key(task, client):
    raise RuntimeError("503 for https://x/?q=1&appid=key+of+mine-123")

async def knows(task, client):
    await solve(task, client)
    return repr(task)

async def never_fits(task, client):
    await ask(client, "x" * 5000)

async def overflows(task, client):
    await ask(client)
    await never_fits(task, client)

async def is_impatient(task, client):
    await ask(client)
    await asyncio.wait_for(ask(client), 0.2)

async def is_impatient_with_itself(task, client):
    await ask(client)
    await asyncio.wait_for(asyncio.sleep(60), 0.1)

async def cancels(task, client):
    waiting = asyncio.ensure_future(asyncio.sleep(3600))
    waiting.cancel()
    await waiting

async def exits(task, client):
    raise SystemExit("enough")

class Stop(BaseException):
    pass

ERRORS = {
    "group": ExceptionGroup("two", [ValueError("no number")]), "stop": Stop(), "tool": ToolUnavailableError("down"),
    "tools": ExceptionGroup("two", [ValueError(), ToolUnavailableError("down")]),
}

async def fails_after_a_reply(task, client):
    await ask(client)
    if task.question in ERRORS:
        raise ERRORS[task.question]
    await asyncio.sleep(3600)

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
        return command_solving(CommandAgentConfig(command="python agent.py", max_memory_mb=256), str(tmp_path))

    return written


async def attempt(solve, *texts, told=None, engine=None, question="What is 6*7?", timeout_s=60, **limits):
    endpoint = Endpoint()
    agent = CustomAgent(
        solve,
        endpoint,
        writer=engine_writers(engine or ScriptedEngine(texts), 0.7),
        chat=ChatFormat(ScriptedTokenizer()),
        rules=RULES,
        limits=RolloutConfig(episode_timeout_s=timeout_s, **limits),
    )
    task = replace(make_task(), question=question)
    trajectory = await agent.run(task, trajectory_id="g/0", group_id="g", on_turn=told)
    endpoint.close()
    return trajectory


async def failure_of(*arguments, **settings):
    trajectory = await attempt(*arguments, **settings)
    assert (trajectory.stop_reason, trajectory.answer) == ("failed" if trajectory.turns else "infrastructure", None)
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
    assert told == "GivenTask(id='task-1', dataset='lookup', question='What is 6*7?')"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("exits", "SystemExit"), ("cancels", "agent"), ("gives_none", "NoneType"), ("wraps", "coroutine")],
)
async def test_a_function_that_fails_is_reported_in_one_line_and_scores_nothing(functions, name, kind):
    assert kind in await failure_of(functions(name))


async def test_a_key_in_an_error_is_not_written_down(functions, monkeypatch):
    monkeypatch.setenv("WEATHER_API_KEY", "key of mine-123")
    said = await failure_of(functions("tells_its_key"), "1")
    assert "mine-123" not in said
    assert "appid=[WEATHER_API_KEY]" in said


@pytest.mark.parametrize(
    ("error", "stop"),
    [
        *(("group", "failed"), ("stop", "failed"), ("none: it takes too long", "failed")),
        *(("tool", "infrastructure"), ("tools", "infrastructure")),
    ],
)
@pytest.mark.parametrize("count_failed", [True, False])
async def test_a_function_that_fails_after_a_reply_is_wrong_unless_a_tool_failed(functions, error, stop, count_failed):
    solve = functions("fails_after_a_reply")
    trajectory = await attempt(
        solve, "1", question=error, timeout_s=1 if " " in error else 60, count_failed=count_failed
    )
    assert (trajectory.stop_reason, trajectory.answer) == (stop if count_failed else "infrastructure", None)
    assert trajectory.failure
    assert outcome_of(trajectory) == (0.0 if trajectory.stop_reason == "failed" else None)


async def test_an_attempt_that_cannot_be_opened_is_reported_and_raises_nothing(functions, monkeypatch):
    def no_port(endpoint, attempt):
        raise OSError("too many open files")

    monkeypatch.setattr(Endpoint, "admit", no_port)
    assert "OSError" in await failure_of(functions("solve"), "1", "2")


@pytest.mark.parametrize("name", ["never_ends", "sleeps", "fails_late"])
async def test_a_function_that_ignores_its_time_limit_is_left_behind_and_logs_nothing(functions, name, monkeypatch):
    logged = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    monkeypatch.setattr("rollout.agent.custom.GRACE_S", 0.1)
    assert "rollout.episode_timeout_s" in await failure_of(functions(name), timeout_s=0.2)
    gc.collect()
    await asyncio.sleep(0)
    assert logged == []


@pytest.mark.parametrize("name", ["repeats", "is_refused", "asks_side_by_side"])
async def test_an_agent_that_never_stops_asking_ended_so_and_is_scored(functions, name, monkeypatch):
    monkeypatch.setattr("rollout.agent.custom.GRACE_S", 0.2)
    trajectory = await attempt(functions(name), *"a" * 99)
    assert (trajectory.stop_reason, trajectory.answer, trajectory.failure) == ("calls", None, None)
    assert len(trajectory.turns) == RULES.max_calls


async def test_an_agent_that_is_refused_a_further_call_may_answer(functions):
    trajectory = await attempt(functions("gives_up"), *"a" * 99)
    assert (trajectory.stop_reason, trajectory.answer) == ("answered", "PermissionDeniedError")


async def test_an_agent_that_is_refused_a_further_call_gets_the_replies_to_those_before(functions, monkeypatch):
    monkeypatch.setattr("rollout.agent.custom.GRACE_S", 1)
    engine = GatedEngine(["a"] * RULES.max_calls)
    asyncio.get_running_loop().call_later(1.5, engine.gate.set)
    assert (await attempt(functions("counts_replies"), engine=engine)).answer == str(RULES.max_calls)


@pytest.mark.parametrize("name", ["solve", "fails_after_a_reply"])
async def test_the_wall_time_bounds_an_attempt_that_waits_for_its_engine_or_for_itself(functions, name):
    engine = GatedEngine("a") if name == "solve" else None
    assert "rollout.wall_timeout_s" in await failure_of(functions(name), "1", engine=engine, wall_timeout_s=1)


async def test_an_agent_that_fails_over_a_full_context_ended_so_and_is_scored(functions):
    trajectory = await attempt(functions("overflows"), "1")
    assert (trajectory.stop_reason, trajectory.answer, trajectory.failure) == ("context", None, None)


async def test_an_agent_whose_first_prompt_does_not_fit_is_unscored_and_says_why(functions):
    trajectory = await attempt(functions("never_fits"), "1")
    assert (trajectory.stop_reason, trajectory.answer, trajectory.turns) == ("infrastructure", None, ())
    assert "rollout.engine.max_model_len" in trajectory.failure


class SlowEngine(ScriptedEngine):
    """Never samples the second reply."""

    async def generate(self, request):
        if self.requests:
            await asyncio.sleep(3600)
        return await super().generate(request)


@pytest.mark.parametrize(
    ("name", "stop_reason"), [("is_impatient", "infrastructure"), ("is_impatient_with_itself", "failed")]
)
async def test_a_timeout_over_the_engine_is_no_failure_of_the_agent(functions, name, stop_reason):
    trajectory = await attempt(functions(name), engine=SlowEngine("a"))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (stop_reason, 1)
    assert "TimeoutError" in trajectory.failure


async def test_a_fault_leaves_an_attempt_unscored_also_after_a_refusal(functions, program):
    unavailable = program("try: ask('x' * 5000)\nexcept KeyError: raise SystemExit(os.EX_TEMPFAIL)")
    for solve in (functions("fails_once_it_is_refused"), unavailable):
        trajectory = await attempt(solve, *"a" * 99)
        assert (trajectory.stop_reason, trajectory.answer) == ("infrastructure", None)
        assert trajectory.turns


async def test_a_refusal_that_another_library_quotes_is_no_fault(functions):
    assert (await attempt(functions("quotes_the_refusal"), *"a" * 99)).stop_reason == "calls"


async def test_the_answer_of_a_program_is_the_last_line_that_it_prints(program):
    trajectory = await attempt(program("print('thinking')\nprint(said)\nprint()"), "42")
    assert (trajectory.answer, trajectory.stop_reason) == ("42", "answered")
    assert text_of(trajectory.turns[0].prompt_token_ids) == "<s>user:What is 6*7?<e><s>assistant:"


@pytest.mark.parametrize("ending", ["post('/answer', {'answer': said}); time.sleep(600)", "print(said)"])
async def test_a_program_that_has_answered_is_not_waited_for_and_ends_with_its_daemons(program, tmp_path, ending):
    note = tmp_path / "pids"
    daemon = f"""
        import time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                open({str(note)!r} + "s", "w").write(f"{{os.getpid()}} {{os.getsid(0)}}")
                os.rename({str(note)!r} + "s", {str(note)!r})
                os.execve("/bin/sleep", ["sleep", "600"], {{}})
            os._exit(0)
        while not os.path.exists({str(note)!r}):
            time.sleep(0.01)
        {ending}
    """
    trajectory = await attempt(program(daemon), "42", timeout_s=20)
    assert (trajectory.answer, trajectory.stop_reason, trajectory.failure) == ("42", "answered", None)
    assert_gone(note.read_text().split())
    assert not {"Program.run", "Event.wait"} & {one.get_coro().__qualname__ for one in asyncio.all_tasks()}


EATS = "kept = bytearray(600 << 20)\nfor place in range(0, len(kept), 4096): kept[place] = 1\ntime.sleep(600)"
FORKS = "for _ in range(600): os.fork() or (os.execv('/bin/sleep', ['sleep', '600']))\ntime.sleep(600)"


@pytest.mark.parametrize(
    ("ending", "stop", "says"),
    [
        *(("raise SystemExit('no luck')", "failed", "no luck"), ("os.kill(os.getpid(), 15)", "failed", "15")),
        *(("", "failed", "nothing"), ("raise SystemExit(os.EX_TEMPFAIL)", "infrastructure", "75")),
        *(("os.kill(os.getpid(), 9)", "infrastructure", "9"), ("print('x' * 2_000_000)", "failed", "524288")),
        *((EATS, "failed", "agent.max_memory_mb"), ("sys.setrecursionlimit(9); f()", "failed", "NameError")),
        pytest.param(FORKS, "failed", ("512", "agent.max_memory_mb"), id="forks"),
        ("open('big', 'wb').truncate(2 << 30)", "failed", "OSError"),
        (r"print('x' * 600_000 + '\n' * 300_000)", "failed", "524288"),
    ],
)
async def test_a_program_that_fails_is_reported_in_one_line_and_gives_no_answer(program, ending, stop, says):
    trajectory = await attempt(program("import time\n" + ending), "42")
    assert (trajectory.stop_reason, trajectory.answer) == (stop, None)
    assert any(word in trajectory.failure for word in ([says] if isinstance(says, str) else says))
    assert "\n" not in trajectory.failure


async def test_a_program_that_the_system_cannot_execute_is_reported(tmp_path):
    (tmp_path / "agent").write_text("no program\n")
    (tmp_path / "agent").chmod(0o700)
    solve = command_solving(CommandAgentConfig(command="agent", max_memory_mb=256), str(tmp_path))
    assert "Exec format error" in await failure_of(solve)


@pytest.mark.parametrize(
    "does",
    [
        "for name in os.listdir('..'): os.path.isdir('../' + name) or os.remove('../' + name)",
        "os.mkfifo('../fifo'); os.symlink('/dev/zero', '../zero')",
        "for _ in range(3000): os.mkdir('d'); os.chdir('d')",
        "for number in range(20_000): open(str(number), 'w')",
        "os.mkdir('closed'); open('closed/x', 'w'); os.chmod('closed', 0); os.chmod('.', 0)",
        "sys.stdout.write('x\\n' * 10_000_000)",
        "os.close(0)",
        "os.set_blocking(1, False)",
    ],
)
async def test_what_a_program_does_to_its_folder_and_output_harms_nobody(program, does, tmp_path_factory, monkeypatch):
    # Other processes of tests have folders in the usual place.
    place = tmp_path_factory.mktemp("place")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    wrote = "\nprint('\\n' + said); sys.stdout.flush(); os.write(1, b'\\n' * 1000)"
    assert (await attempt(program(f"import sys\n{does}{wrote}"), "42")).answer == "42"
    assert not list(place.glob("*agentflow*"))


@pytest.mark.skipif(kernel.landlock_version() < kernel.SCOPED_VERSION, reason="the kernel cannot confine signals")
async def test_a_program_reads_the_environment_of_no_other_process_and_signals_none(program):
    tries = """
        read = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                if int(name) != os.getpid() and open(f"/proc/{name}/environ", "rb").read():
                    read.append(name)
            except OSError:
                pass
        try:
            os.kill(os.getppid(), 0)
            read.append("signalled")
        except PermissionError:
            pass
        print(said, read)
    """
    assert (await attempt(program(tries), "42")).answer == "42 []"


KILLED = """
import asyncio, os, signal, sys
import psutil
from rollout.agent.custom import Program

async def main():
    running = asyncio.ensure_future(Program("python agent.py", sys.argv[1]).run({}, {}, max_memory_mb=512))
    while not os.path.exists(sys.argv[1] + "/whole"):
        await asyncio.sleep(0.01)
    if sys.argv[2] == "as Ray does":
        for child in psutil.Process().children():
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["alone", "as Ray does"])
def test_a_worker_that_is_killed_leaves_nothing_of_its_programs(tmp_path, how):
    (tmp_path / "agent.py").write_text(
        textwrap.dedent(f"""
        import os, time
        os.chdir({str(tmp_path)!r})
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 3)
                open("pids", "w").write(f"{{os.getpid()}} {{os.getppid()}} {{os.environ['HOME']}}")
                os.rename("pids", "whole")
                os.execve("/bin/sleep", ["sleep", "600"], {{}})
        time.sleep(600)
    """)
    )
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), how], cwd=Path(__file__).parents[2], check=False)
    *pids, home = (tmp_path / "whole").read_text().split()
    assert_gone(pids)
    until_not(Path(home).parent.exists)


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


def assert_gone(pids):
    gone = {*map(int, pids)}
    until_not(lambda: gone & {one.pid for one in psutil.process_iter(["status"]) if one.info["status"] != "zombie"})


def until_not(true):
    deadline = time.monotonic() + 20
    while true() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not true()
