"""Selection of tools, and the wrappers of those that return outside text."""

import asyncio
from contextlib import ExitStack

import pytest
from pydantic import ValidationError

from configs.envs import EnvsConfig
from configs.errors import UserError
from envs.tools.guard import BLOCKED, BlockList, CachedTool, GuardedTool, read_questions
from envs.tools.toolbox import Toolbox
from envs.types import ToolResult, ToolUnavailableError
from rollout.agent.planner import system_prompt

QUESTION = "How many crates of wool locks does the blue truck carry on its way to the harbour town?"


class Weather:
    name = "weather"
    description = "today's weather of a city"

    async def call(self, arguments: str) -> ToolResult:
        return ToolResult(text=f"{arguments}: 12 degrees")


class Counter:
    """Counts its calls, and how many counters were closed."""

    name = "counter"
    description = "count calls"
    closed = 0

    def __init__(self):
        self.calls = 0

    async def call(self, arguments: str) -> ToolResult:
        self.calls += 1
        return ToolResult(text=str(self.calls))

    def close(self):
        Counter.closed += 1


class Nameless:
    description = "no name"

    async def call(self, arguments: str) -> ToolResult:
        raise NotImplementedError


class ScriptedTool:
    name = "scripted"
    description = "answers from a script"

    def __init__(self, *answers, pause_s=0.0):
        self.answers = list(answers)
        self.calls = []
        self._pause_s = pause_s

    async def call(self, arguments: str) -> ToolResult:
        self.calls.append(arguments)
        await asyncio.sleep(self._pause_s)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return ToolResult(text=answer) if isinstance(answer, str) else answer


class Synchronous(Weather):
    def call(self, arguments):
        return ToolResult(text=arguments)


class Greedy(Weather):
    async def call(self, city, day):
        return ToolResult(text=city + day)


def own(name, attribute, **more):
    tools = {name: {"source": f"{__name__}:{attribute}"}}
    return EnvsConfig(actions=("think", name, "answer"), tools=tools, **more)


# The actions of a recipe


def test_tools_and_prompt_follow_the_order_of_the_recipe():
    config = EnvsConfig(actions=("answer", "wikipedia_search", "web_search", "think"))
    with Toolbox(config) as toolbox, toolbox.episode() as tools:
        assert tuple(tool.name for tool in tools) == config.actions
        assert "web_search: read web pages" in system_prompt(tools)


@pytest.mark.parametrize(
    ("actions", "tools", "setting"),
    [
        (("think",), {}, "actions"),
        (("answer", "tavily"), {}, "actions"),
        (("answer", "answer"), {}, "actions"),
        (("answer",), {"code": {"source": "m:C"}}, r"tools\.code"),
        (("answer",), {'x" | "y': {"source": "m:C"}}, r"tools\.x"),
        (("answer",), {"x": {"source": "mcp:https://example.org/mcp#*", "description": "all"}}, "description"),
        (("answer",), {"x": {"source": "m:C", "description": "a class"}}, "description"),
        (("answer",), {"x": {"source": "no class"}}, r"tools\.x\.source"),
    ],
)
def test_invalid_actions_are_refused(actions, tools, setting):
    with pytest.raises(ValidationError, match=setting):
        EnvsConfig(actions=actions, tools=tools)


def test_a_missing_key_is_reported_at_the_start(monkeypatch):
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)
    with pytest.raises(UserError, match="TAVILY_API_KEY"):
        Toolbox(EnvsConfig(actions=("search", "answer"), search="tavily"))


def test_a_toolbox_that_cannot_be_opened_leaves_no_sandbox_behind(monkeypatch):
    ended, sandbox = [], ExitStack()
    sandbox.state = None
    sandbox.callback(ended.append, "sandbox")
    monkeypatch.setattr("envs.tools.toolbox.Sandbox", lambda settings: sandbox)
    with pytest.raises(UserError):
        Toolbox(EnvsConfig(actions=("code", "base_generator", "answer")))
    assert ended == ["sandbox"]


# Custom tools


async def test_a_custom_tool_is_made_for_every_episode_and_closed_with_it():
    with Toolbox(own("counter", "Counter")) as toolbox:
        for _ in range(2):
            with toolbox.episode() as tools:
                before = Counter.closed
                assert [(await tools[1].call("x")).text, (await tools[1].call("x")).text] == ["1", "2"]
            assert Counter.closed == before + 1


def test_an_mcp_tool_has_the_description_and_the_limits_of_the_recipe():
    tools = {"lookup": {"source": "mcp:https://example.org/mcp#find", "description": "look it up"}}
    config = EnvsConfig(actions=("lookup", "answer"), tools=tools, max_result_chars=9000)
    with Toolbox(config) as toolbox, toolbox.episode() as opened:
        assert "lookup: look it up" in system_prompt(opened)
        assert (opened[0]._tool._time_limit_s, opened[0]._tool._max_chars) == (30.0, 9000)
    with pytest.raises(UserError, match=r"envs\.tools\.lookup"):
        Toolbox(EnvsConfig(actions=("lookup", "answer"), tools={"lookup": tools["lookup"] | {"source": "mcp:x://y"}}))


UNFIT = ("nameless Nameless", "rain Weather", "x NoSuchClass", "x QUESTION", "weather Synchronous", "weather Greedy")


@pytest.mark.parametrize(("name", "attribute"), map(str.split, UNFIT))
def test_a_class_without_the_parts_of_a_tool_is_refused(name, attribute):
    with pytest.raises(UserError, match=rf"^envs\.tools\.{name}: "):
        Toolbox(own(name, attribute))


# Wrappers of tools from outside


def guarded(*answers, questions=(), time_limit_s=5.0, **settings):
    return GuardedTool(ScriptedTool(*answers, **settings), BlockList((), questions), time_limit_s=time_limit_s)


async def test_a_result_with_a_held_out_question_is_left_out():
    result = await guarded(f"Quiz. {QUESTION}\nAnswer: 35", questions=[QUESTION]).call("x")
    assert result == ToolResult(text=BLOCKED, error="blocked", foreign=True)


async def test_a_long_result_is_cut_and_lone_surrogates_are_replaced():
    result = await guarded("\ud800" + "x" * 1_000_000).call("x")
    assert (result.text[:3], len(result.text)) == ("?xx", 100_000)


async def test_a_tool_gets_no_lone_surrogates():
    tool = ScriptedTool("x")
    await GuardedTool(tool, BlockList(), time_limit_s=5.0).call("half \ud83d")
    assert tool.calls == ["half ?"]


async def test_a_tool_that_hangs_or_fails_is_unavailable():
    with pytest.raises(ToolUnavailableError, match=r"0\.05 s"):
        await guarded("x", pause_s=5, time_limit_s=0.05).call("x")
    with pytest.raises(ToolUnavailableError, match="KeyError in test_toolbox") as caught:
        await guarded(KeyError("secret")).call("x")
    assert "secret" not in str(caught.value)
    with pytest.raises(ToolUnavailableError):
        await guarded(42).call("x")  # not a result


# The block list


def test_hosts_are_blocked_with_their_subdomains_and_no_others():
    block_list = BlockList(["blocked.example"])
    assert not block_list.allows("https://blocked.example/x", "")
    assert not block_list.allows("https://a.BLOCKED.example./x", "")
    assert block_list.allows("https://notblocked.example/", "")
    assert block_list.allows("https://blocked.example.org/", "")


@pytest.mark.parametrize(
    ("text", "blocked"),
    [
        (QUESTION, True),
        (QUESTION.upper().replace(" ", "\n "), True),
        ("... does the blue truck carry on its way to the harbour town? ...", False),
        ("wool locks does the blue truck carry on its way to the harbour town?", True),
        ("The blue truck carries wool locks to the harbour town.", False),
        ("FAQ: Who painted the ceiling of the chapel? Somebody.", True),
        ("Who painted the ceiling of the hall? Who are you?", False),
    ],
)
def test_a_run_of_thirteen_words_or_a_whole_question_is_blocked(text, blocked):
    questions = [QUESTION, "Who painted the ceiling of the chapel?", "Who are you?"]
    assert BlockList((), questions).blocks_text(text) == blocked


def test_questions_are_read_from_plain_lines_and_json(tmp_path):
    file = tmp_path / "questions.txt"
    # A line ends only at a line feed: text from the web holds U+2028, which JSON allows within a string.
    file.write_text('{"question": "One\u2028and two?"}\n\nThree\u0085times?\r\nFour?\n', encoding="utf-8-sig")
    assert [one.strip() for one in read_questions(file)] == ["One\u2028and two?", "Three\u0085times?", "Four?"]
    file.write_text('One?\n{"answer": 2}\n')
    with pytest.raises(UserError, match=r"envs\.web\.blocked_questions"):
        read_questions(file)
    with pytest.raises(UserError, match=r"envs\.web\.blocked_questions"):
        Toolbox(EnvsConfig(actions=("answer",), web={"blocked_questions": str(tmp_path / "none")}))


# The cache


def cached(tool, max_entries=10):
    return CachedTool(tool, max_entries=max_entries)


async def test_equal_calls_at_the_same_time_share_one_request():
    tool = ScriptedTool("one", "two", pause_s=0.01)
    results = await asyncio.gather(*(cached_call for cached_call in map(cached(tool).call, ["q", " q ", "q"])))
    assert ({result.text for result in results}, tool.calls) == ({"one"}, ["q"])


async def test_answers_are_cached_and_failures_are_not():
    tool = cached(ScriptedTool(ToolResult(text="no", error="timeout"), ToolUnavailableError("down"), "yes", "later"))
    assert (await tool.call("q")).error == "timeout"
    with pytest.raises(ToolUnavailableError):
        await tool.call("q")
    assert [(await tool.call("q")).text, (await tool.call("q")).text] == ["yes", "yes"]


async def test_the_least_used_answers_are_dropped():
    tool = ScriptedTool("1", "2", "3", "4")
    small = cached(tool, max_entries=2)
    for query in ("a", "b", "a", "c", "a", "b"):
        await small.call(query)
    assert tool.calls == ["a", "b", "c", "b"]


async def test_a_cancelled_caller_does_not_cancel_the_request_of_the_others():
    tool = cached(ScriptedTool("yes", pause_s=0.05))
    hasty = asyncio.create_task(tool.call("q"))
    patient = asyncio.create_task(tool.call("q"))
    await asyncio.sleep(0.01)
    hasty.cancel()
    assert (await patient).text == "yes"
