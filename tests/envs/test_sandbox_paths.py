"""The attack corpus on each way by which code reaches the sandbox: as a decision of the planner in JSON, and through
the MCP server. No way may add a hole, also under fifty attacks at once."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from attacks import Attack, Canaries, all_attacks, left_over, placed_canaries, signs_of_escape
from fastmcp import Client
from mcp_processes import started
from scripted import decision, make_agent, run

from envs.sandbox import Sandbox, SandboxSettings
from envs.tools.toolbox import PythonCodeTool
from envs.types import ToolResult
from rollout.agent.planner import Decision
from tests.changed import replace

AT_ONCE = 50
_TIMEOUT_S, _HANG_TIMEOUT_S = 2.0, 0.3
_SERVER = Path(__file__).parent / "serve_bare_sandbox.py"

# An attack may run on this machine itself only behind the walls of the tier that hides it.
pytestmark = pytest.mark.usefixtures("namespaces")

Call = Callable[[str, float], Awaitable[ToolResult]]
"""Run a code text under a time limit."""


@pytest.fixture(scope="module")
def canaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Canaries]:
    with placed_canaries(tmp_path_factory.mktemp("canary")) as placed:
        yield placed


@asynccontextmanager
async def _opened(path: str) -> AsyncIterator[tuple[Call, psutil.Process, psutil.Process]]:
    """Open a path to the sandbox; yields the call, the exposed process of the host, and the sandbox's watcher."""
    if path == "mcp":
        with started([sys.executable, str(_SERVER), str(_TIMEOUT_S), str(_HANG_TIMEOUT_S)]) as server:
            # The old protocol keeps one connection per client, the new one none: a session for each call.
            async with Client(server.url) as client:
                host = psutil.Process(server.process.pid)
                (watcher,) = host.children()
                yield _by_mcp(client), host, watcher
        return
    with Sandbox(SandboxSettings(tier="namespaces", check_imports=False, memory_mb=512)) as sandbox:
        yield _by_agent(sandbox), psutil.Process(), psutil.Process(sandbox.pid)


def _by_agent(sandbox: Sandbox) -> Call:
    """The planner writes the code in its JSON decision, the executor parses and runs it, then it answers."""

    async def call(code: str, timeout_s: float) -> ToolResult:
        tool = PythonCodeTool(sandbox, timeout_s=timeout_s)
        written = Decision(thought="t", action="code", action_input=code).to_json()
        agent = make_agent([written, decision("answer", "done")], tools=[tool], timeout_s=120)
        envs = agent.config.envs.model_copy(update={"max_result_chars": 40_000})
        agent = replace(agent, config=agent.config.model_copy(update={"envs": envs}))
        try:
            trajectory = await run(agent)
        finally:
            tool.close()
        assert trajectory.turns[0].tool_call.arguments == code
        return trajectory.turns[0].tool_result

    return call


def _by_mcp(client: Client) -> Call:
    async def call(code: str, timeout_s: float) -> ToolResult:
        if code != code.encode(errors="replace").decode():  # it cannot even be sent
            return ToolResult(text="", error="syntax")
        name = "hanging_code" if timeout_s == _HANG_TIMEOUT_S else "code"
        result = await client.call_tool(name, {"input": code}, raise_on_error=False)
        return ToolResult(text=result.content[0].text, error=(result.meta or {}).get("error"))

    return call


async def _attack(call: Call, canaries: Canaries, attack: Attack, target: psutil.Process) -> list[str]:
    code = canaries.place_in(attack["code"], pid=target.pid)
    timeout_s = _HANG_TIMEOUT_S if attack.get("hangs") else _TIMEOUT_S
    for _ in range(attack.get("repeat", 1)):
        result = await call(code, timeout_s)
    assert len(result.text) < 25_000
    return signs_of_escape(attack, result.text, result.error)


@pytest.mark.parametrize("path", ["agent", "mcp"])
async def test_fifty_attacks_at_once_are_all_held(path: str, canaries: Canaries) -> None:
    """Each of fifty attackers takes the next attack of the corpus until there is none."""
    waiting, signs = iter(all_attacks()), []
    async with _opened(path) as (call, target, watcher):

        async def attacker() -> None:
            for attack in waiting:
                signs.extend(await _attack(call, canaries, attack, target))

        await asyncio.gather(*(attacker() for _ in range(AT_ONCE)))
        assert signs == []
        assert canaries.touched() == []
        assert target.is_running()
        assert (await call("6 * 7", _TIMEOUT_S)).text.strip() == "42"
        assert left_over(watcher) == []


@pytest.mark.parametrize(
    "written",
    [
        '{"thought":"t","action":"code","action_input":"1","action_input":"import os"}',
        '{"thought":"t","action":"code","action_input":{"code":"import os"}}',
        '{"thought":"t","action":"__class__","action_input":"1"}',
        '{"thought":"t","action":"CODE","action_input":"1"}',
        '{"thought":"t","action":"code","action_input":"1"}{"thought":"t","action":"code","action_input":"2"}',
        '{"thought":"t","action":"code","action_input":"1","timeout_s":1e9}',
        '[{"thought":"t","action":"code","action_input":"1"}]',
        "[" * 5_000,
    ],
)
async def test_no_trick_in_the_json_itself_reaches_the_code_tool(written: str) -> None:
    class Untouchable:
        name, description = "code", "code"

        async def call(self, arguments: str) -> ToolResult:
            raise AssertionError(arguments)

    trajectory = await run(make_agent([written] * 6, tools=[Untouchable()]))
    assert trajectory.num_format_errors == 6
