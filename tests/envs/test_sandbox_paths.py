"""The attack corpus on each way by which code reaches the sandbox: as a decision of the planner in JSON, and through
the MCP server. No way may add a hole, also under fifty attacks at once."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from attacks import Attack, Canaries, all_attacks, left_over, placed_canaries, signs_of_escape
from fastmcp import Client
from scripted import decision, make_agent, run

from envs.mcp_server import build_server
from envs.sandbox import Sandbox, SandboxSettings
from envs.tools.toolbox import PythonCodeTool
from envs.types import ToolResult
from rollout.agent.planner import Decision
from tests.changed import replace

AT_ONCE = 50
_TIMEOUT_S, _HANG_TIMEOUT_S = 2.0, 0.3

# An attack may run on this machine itself only behind the walls of the tier that hides it.
pytestmark = pytest.mark.usefixtures("namespaces")

Call = Callable[[PythonCodeTool, str], Awaitable[ToolResult]]
"""Run a code text with the tool."""


async def _by_agent(tool: PythonCodeTool, code: str) -> ToolResult:
    """The planner writes the code in its JSON decision, the executor parses and runs it, then it answers."""
    written = Decision(thought="t", action="code", action_input=code).to_json()
    agent = make_agent([written, decision("answer", "done")], tools=[tool], timeout_s=120)
    envs = agent.config.envs.model_copy(update={"max_result_chars": 40_000})
    agent = replace(agent, config=agent.config.model_copy(update={"envs": envs}))
    trajectory = await run(agent)
    assert trajectory.turns[0].tool_call.arguments == code
    return trajectory.turns[0].tool_result


async def _by_mcp(tool: PythonCodeTool, code: str) -> ToolResult:
    if code != code.encode(errors="replace").decode():  # it cannot even be sent
        return ToolResult(text="", error="syntax")
    async with Client(build_server([tool])) as client:
        result = await client.call_tool("code", {"input": code}, raise_on_error=False)
    return ToolResult(text=result.content[0].text, error=(result.meta or {}).get("error"))


async def _attack(call: Call, sandbox: Sandbox, canaries: Canaries, attack: Attack) -> list[str]:
    timeout_s = _HANG_TIMEOUT_S if attack.get("hangs") else attack.get("timeout_s", _TIMEOUT_S)
    for _ in range(attack.get("repeat", 1)):
        with closing(PythonCodeTool(sandbox, timeout_s=timeout_s)) as tool:
            result = await call(tool, canaries.place_in(attack["code"]))
    assert len(result.text) < 25_000
    return signs_of_escape(attack, result.text, result.error)


@pytest.mark.parametrize("call", [_by_agent, _by_mcp])
async def test_fifty_attacks_at_once_are_all_held(call: Call, tmp_path: Path) -> None:
    """Each of fifty attackers takes the next attack of the corpus until there is none."""
    waiting, signs = iter(all_attacks()), []
    settings = SandboxSettings(tier="namespaces", check_imports=False, memory_mb=512)
    with placed_canaries(tmp_path) as canaries, Sandbox(settings) as sandbox:

        async def attacker() -> None:
            for attack in waiting:
                signs.extend(await _attack(call, sandbox, canaries, attack))

        await asyncio.gather(*(attacker() for _ in range(AT_ONCE)))
        assert signs == []
        assert canaries.touched() == []
        assert sandbox.run("6 * 7").text == "42\n"
        assert left_over(psutil.Process(sandbox.pid)) == []


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
