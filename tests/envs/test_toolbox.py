"""Which tools are switched on, and what stands around those that bring text in."""

import asyncio
import json
import sys

import pytest
from pydantic import ValidationError

from configs.envs import BUILT_IN_ACTIONS, EnvsConfig
from configs.errors import UserError
from configs.loading import load_run_config
from envs.tools.guard import BLOCKED, BlockList, CachedTool, GuardedTool, RecordedTool, Recording, read_questions
from envs.tools.toolbox import BUILDERS, Toolbox
from envs.types import ToolResult, ToolUnavailableError
from rollout.agent.planner import planner_grammar, system_prompt

QUESTION = "How many crates of wool locks does the blue truck carry on its way to the harbour town?"


class Weather:
    name = "weather"
    description = "today's weather of a city"

    async def call(self, arguments: str) -> ToolResult:
        return ToolResult(text=f"{arguments}: 12 degrees")


class Counter:
    """Remembers, and says when it was closed."""

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


class Needy(Weather):
    def __init__(self, city):
        self.city = city


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


def test_the_demo_planner_is_told_the_very_words_it_always_was():
    config = load_run_config(None).envs
    with Toolbox(config) as toolbox, toolbox.episode() as tools:
        assert system_prompt(tools) == (
            "Solve the task step by step with tools. Reply in JSON: thought, action, action_input.\n"
            "think: note a thought\n"
            "search: look up facts by a few keywords, e.g. an item's name\n"
            "code: run Python (math, sympy, numpy); names persist, the last expression is shown\n"
            "answer: give the final answer"
        )
    assert 'action ::= "think" | "search" | "code" | "answer"\n' in planner_grammar(config.actions)


def test_every_built_in_action_has_its_builder():
    assert tuple(BUILDERS) == BUILT_IN_ACTIONS


def test_tools_grammar_and_prompt_follow_the_order_of_the_recipe():
    config = EnvsConfig(actions=("answer", "wikipedia_search", "web_search", "think"))
    with Toolbox(config) as toolbox, toolbox.episode() as tools:
        assert tuple(tool.name for tool in tools) == config.actions
        assert "web_search: read web pages" in system_prompt(tools)


@pytest.mark.parametrize(
    ("actions", "tools", "said"),
    [
        (("think",), {}, "must contain 'answer'"),
        (("answer", "tavily"), {}, "'tavily' is not built in"),
        (("answer", "answer"), {}, "stands twice"),
        (("answer",), {"code": {"source": "m:C"}}, "none of the built-in ones"),
        (("answer",), {'x" | "y': {"source": "m:C"}}, "at most 40 of a-z"),
        (("answer",), {"x": {"source": "mcp:https://example.org/mcp"}}, "needs a description"),
        (("answer",), {"x": {"source": "no class"}}, "must be module:name of a function"),
    ],
)
def test_actions_that_cannot_be_are_refused(actions, tools, said):
    with pytest.raises(ValidationError, match=said):
        EnvsConfig(actions=actions, tools=tools)


@pytest.mark.parametrize(
    ("action", "variable"),
    [("google_search", "GOOGLE_API_KEY"), ("search", "TAVILY_API_KEY")],
)
def test_a_missing_key_stops_before_anything_starts(monkeypatch, action, variable):
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UserError, match=f"set {variable} in the environment"):
        Toolbox(EnvsConfig(actions=(action, "answer"), search="tavily"))


def test_a_toolbox_that_cannot_be_opened_leaves_no_sandbox_behind(monkeypatch):
    ended = []

    class FakeSandbox:
        state = None

        def __init__(self, settings):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            ended.append(self)

    monkeypatch.setattr("envs.sandbox.Sandbox", FakeSandbox)
    with pytest.raises(UserError):
        Toolbox(EnvsConfig(actions=("code", "base_generator", "answer")))
    assert len(ended) == 1


# A tool of one's own


async def test_ten_lines_make_a_tool():
    with Toolbox(own("weather", "Weather")) as toolbox, toolbox.episode() as tools:
        assert "weather: today's weather of a city" in system_prompt(tools)
        assert await tools[1].call("Oslo") == ToolResult(text="Oslo: 12 degrees", foreign=True)


async def test_a_tool_of_ones_own_is_made_afresh_for_every_episode_and_closed_with_it():
    with Toolbox(own("counter", "Counter")) as toolbox:
        for _ in range(2):
            with toolbox.episode() as tools:
                before = Counter.closed
                assert [(await tools[1].call("x")).text, (await tools[1].call("x")).text] == ["1", "2"]
            assert Counter.closed == before + 1


def test_a_class_in_the_folder_of_the_call_is_found(tmp_path, monkeypatch):
    (tmp_path / "tool_of_mine.py").write_text(
        "class Mine:\n    name = 'mine'\n    description = 'd'\n    async def call(self, arguments): ...\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    tools = {"mine": {"source": "tool_of_mine:Mine"}}
    Toolbox(EnvsConfig(actions=("mine", "answer"), tools=tools)).close()


def test_a_tool_of_an_mcp_server_stands_beside_the_others_and_its_own_words_do_not():
    tools = {"lookup": {"source": "mcp:https://example.org/mcp#find", "description": "look it up"}}
    with Toolbox(EnvsConfig(actions=("lookup", "answer"), tools=tools)) as toolbox, toolbox.episode() as opened:
        assert "lookup: look it up" in system_prompt(opened)
    with pytest.raises(UserError, match=r"envs\.tools\.lookup: .* names no MCP server"):
        Toolbox(EnvsConfig(actions=("lookup", "answer"), tools={"lookup": tools["lookup"] | {"source": "mcp:x://y"}}))


@pytest.mark.parametrize(("max_result_chars", "kept"), [(400, 4000), (9000, 9000)])
def test_a_call_of_a_server_has_the_recipes_limits(max_result_chars, kept):
    """Regression: 30 s and 4,000 characters, whatever the recipe said."""
    config = EnvsConfig.model_validate(
        {
            "actions": ["lookup", "answer"],
            "tools": {"lookup": {"source": "mcp:https://example.org/mcp", "description": "look it up"}},
            "max_result_chars": max_result_chars,
            "web": {"time_limit_s": 120.0},
        }
    )
    with Toolbox(config) as toolbox, toolbox.episode() as (tool, _):
        assert (tool._tool._limits.time_limit_s, tool._tool._limits.max_chars) == (120.0, kept)


@pytest.mark.parametrize(
    ("name", "attribute", "said"),
    [
        ("nameless", "Nameless", "Nameless has no `name`"),
        ("rain", "Weather", "the tool is named 'weather'; use that name"),
        ("x", "NoSuchClass", "cannot be imported"),
        ("x", "QUESTION", "is a str; name a function or a class"),
        ("weather", "Needy", "cannot be made without arguments, as each task needs it: TypeError: "),
        ("weather", "Synchronous", "`call` of Synchronous is not async; write `async def call"),
        ("weather", "Greedy", "`call` of Greedy takes one text"),
    ],
)
def test_a_class_that_is_no_tool_is_refused(name, attribute, said):
    with pytest.raises(UserError, match=said):
        Toolbox(own(name, attribute))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from configs.weather import API", "'configs' is a package of agentflow and hides your own of this name"),
        ("def (", "cannot be imported: SyntaxError: "),
        ("1 / 0", "cannot be imported: ZeroDivisionError: "),
        ("import no_such_module_at_all", "No module named 'no_such_module_at_all'$"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch, text, said):
    name = f"broken_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=said):
        Toolbox(EnvsConfig(actions=("mine", "answer"), tools={"mine": {"source": f"{name}:Mine"}}))


def test_a_module_that_an_installed_library_hides_is_told_from_it(tmp_path, monkeypatch):
    (tmp_path / "toml.py").write_text("class Mine: pass\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(UserError, match=r"toml/__init__.py' hides '.*/toml.py': give yours another name"):
        Toolbox(EnvsConfig(actions=("mine", "answer"), tools={"mine": {"source": "toml:Mine"}}))


def test_a_source_in_a_package_of_ours_says_what_hides_it():
    with pytest.raises(UserError, match="'rollout' is a package of agentflow"):
        Toolbox(EnvsConfig(actions=("mine", "answer"), tools={"mine": {"source": "rollout.my_tools:Mine"}}))


# What stands around tools from outside


def guarded(*answers, questions=(), time_limit_s=5.0, **settings):
    return GuardedTool(ScriptedTool(*answers, **settings), BlockList((), questions), time_limit_s=time_limit_s)


async def test_a_result_with_a_held_out_question_is_left_out_whole():
    result = await guarded(f"Quiz. {QUESTION}\nAnswer: 35", questions=[QUESTION]).call("x")
    assert result == ToolResult(text=BLOCKED, error="blocked", foreign=True)


async def test_an_endless_result_is_cut_and_broken_text_mended():
    result = await guarded("\ud800" + "x" * 1_000_000).call("x")
    assert (result.text[:3], len(result.text)) == ("?xx", 100_000)


async def test_a_tool_is_asked_in_whole_letters():
    """Regression: half a surrogate pair broke a request that held it, which ended the attempt unscored."""

    class Echo(ScriptedTool):
        async def call(self, arguments):
            return ToolResult(text=ascii(arguments))

    assert (await GuardedTool(Echo(), BlockList(), time_limit_s=5.0).call("half \ud83d")).text == "'half ?'"


async def test_a_tool_that_hangs_or_breaks_is_unavailable_and_no_run_ends():
    with pytest.raises(ToolUnavailableError, match=r"no result within 0\.05 s"):
        await guarded("x", pause_s=5, time_limit_s=0.05).call("x")
    with pytest.raises(ToolUnavailableError, match=r"^scripted failed with KeyError in test_toolbox\.py, line \d+$"):
        await guarded(KeyError("secret")).call("x")


async def test_a_tool_that_returns_something_else_than_a_result_is_unavailable():
    class Careless(ScriptedTool):
        async def call(self, arguments):
            return "42"

    with pytest.raises(ToolUnavailableError, match=r"^scripted returned str, not a ToolResult$"):
        await GuardedTool(Careless(), BlockList(), time_limit_s=5.0).call("x")


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
    ],
)
def test_a_run_of_thirteen_words_of_a_question_is_benchmark_text(text, blocked):
    assert BlockList((), [QUESTION]).blocks_text(text) == blocked


def test_a_short_question_is_matched_whole_and_a_shorter_one_never():
    block_list = BlockList((), ["Who painted the ceiling of the chapel?", "Who are you?"])
    assert block_list.blocks_text("FAQ: Who painted the ceiling of the chapel? Somebody.")
    assert not block_list.blocks_text("Who painted the ceiling of the hall? Who are you?")


def test_latex_does_not_hide_a_question():
    question = (
        r"Find the number of lattice points inside the circle of radius $\sqrt{25}$ around the origin of a plane."
    )
    shown = "find the number of lattice points inside the circle of radius 25 around the origin"
    assert BlockList((), [question]).blocks_text(shown)


def test_questions_are_read_from_plain_lines_and_json(tmp_path):
    file = tmp_path / "questions.txt"
    file.write_text('One?\n\n{"question": "Two?", "answer": 2}\n')
    assert read_questions(file) == ["One?", "Two?"]
    file.write_text('One?\n{"answer": 2}\n')
    with pytest.raises(ValueError, match=r"line 2 of .* is no JSON object with the field 'question'"):
        read_questions(file)


def test_first_blocked_question_stands_behind_a_mark_of_byte_order(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "One?"}\n', encoding="utf-8-sig")
    assert read_questions(file) == ["One?"]


def test_a_line_ends_where_it_ends_and_not_at_another_separator(tmp_path):
    """Regression: text from the web holds U+2028, which JSON allows within a string."""
    file = tmp_path / "questions.txt"
    file.write_text('{"question": "One\u2028and two?"}\nThree\u0085times?\r\nFour?\n', encoding="utf-8")
    assert read_questions(file) == ["One\u2028and two?", "Three\u0085times?", "Four?"]


def test_a_file_of_questions_that_is_not_there_stops_before_anything_starts(tmp_path):
    config = EnvsConfig(actions=("answer",), web={"blocked_questions": str(tmp_path / "none")})
    with pytest.raises(UserError, match=r"envs\.web\.blocked_questions: .* cannot be read"):
        Toolbox(config)


# The cache


def cached(tool, **settings):
    return CachedTool(tool, **({"max_entries": 10, "max_age_s": 60.0} | settings))


async def test_siblings_that_ask_the_same_at_once_share_one_request():
    tool = ScriptedTool("one", "two", pause_s=0.01)
    results = await asyncio.gather(*(cached_call for cached_call in map(cached(tool).call, ["q", " q ", "q"])))
    assert ({result.text for result in results}, tool.calls) == ({"one"}, ["q"])


async def test_an_answer_is_kept_and_a_failure_is_not():
    tool = cached(ScriptedTool(ToolResult(text="no", error="timeout"), ToolUnavailableError("down"), "yes", "later"))
    assert (await tool.call("q")).error == "timeout"
    with pytest.raises(ToolUnavailableError):
        await tool.call("q")
    assert [(await tool.call("q")).text, (await tool.call("q")).text] == ["yes", "yes"]


async def test_old_answers_and_the_least_used_ones_are_forgotten():
    tool = ScriptedTool("1", "2", "3", "4")
    small = cached(tool, max_entries=2)
    for query in ("a", "b", "a", "c", "a", "b"):
        await small.call(query)
    assert tool.calls == ["a", "b", "c", "b"]
    stale = ScriptedTool("1")
    brief = cached(stale, max_age_s=0.0)
    await brief.call("a")
    await brief.call("a")
    assert len(stale.calls) == 2


async def test_whoever_gives_up_waiting_does_not_take_the_answer_away_from_the_others():
    tool = cached(ScriptedTool("yes", pause_s=0.05))
    hasty = asyncio.create_task(tool.call("q"))
    patient = asyncio.create_task(tool.call("q"))
    await asyncio.sleep(0.01)
    hasty.cancel()
    assert (await patient).text == "yes"


# Record and replay


def recorded(path, mode, *answers):
    tool = ScriptedTool(*answers)
    return RecordedTool(tool, Recording(path, mode)), tool


async def test_what_was_recorded_is_replayed_without_asking_anybody(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    recording, _ = recorded(path, "record", "first", ToolResult(text="refused", error="blocked"))
    first, second = await recording.call("a"), await recording.call(" b\n")
    replay, asked = recorded(path, "replay", "never")
    assert await replay.call("a") == ToolResult(text="first", foreign=True) == ToolResult(text=first.text, foreign=True)
    assert await replay.call("b") == ToolResult(text=second.text, error="blocked", foreign=True)
    assert asked.calls == []
    assert [json.loads(line)["arguments"] for line in path.read_text().splitlines()] == ["a", "b"]


async def test_a_call_that_was_not_recorded_is_a_fault_that_says_so(tmp_path):
    path = tmp_path / "results.jsonl"
    await recorded(path, "record", "x")[0].call("a")
    replay, asked = recorded(path, "replay", "never")
    with pytest.raises(ToolUnavailableError, match="holds no result of scripted for 'other'; record it with"):
        await replay.call("other")
    assert asked.calls == []


async def test_the_first_result_of_a_call_stands_for_good_in_every_process(tmp_path):
    path = tmp_path / "results.jsonl"
    one, _ = recorded(path, "record", "from one")
    two, asked = recorded(path, "record", "from two")
    assert (await one.call("a")).text == "from one"
    assert (await two.call("a")).text == "from one"
    assert asked.calls == []
    # Both ask before either has written: the one that writes first is right.
    assert {result.text for result in await asyncio.gather(one.call("b"), two.call("b"))} == {"from one"}
    assert len(path.read_text().splitlines()) == 2


async def test_a_line_that_a_crash_cut_off_is_written_over(tmp_path):
    path = tmp_path / "results.jsonl"
    await recorded(path, "record", "x")[0].call("a")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:10])
    await recorded(path, "record", "y")[0].call("b")
    replay, _ = recorded(path, "replay", "never")
    assert [(await replay.call(query)).text for query in "ab"] == ["x", "y"]


def test_a_recording_that_is_only_checked_makes_no_folder_and_one_that_cannot_be_written_is_refused(tmp_path):
    Recording(tmp_path / "a" / "b" / "results.jsonl", "record")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written: '.*/file' is no folder"):
        Recording(tmp_path / "file" / "results.jsonl", "record")


def test_no_recording_or_a_broken_one_stops_before_anything_starts(tmp_path):
    with pytest.raises(UserError, match="record one first"):
        Recording(tmp_path / "none", "replay")
    broken = tmp_path / "broken"
    broken.write_text('{"tool": "x"}\n')
    with pytest.raises(UserError, match=r"line 1 .* is not a recorded result"):
        Recording(broken, "replay")


async def test_a_recipe_records_tools_from_outside_and_leaves_the_planners_own_moves_alone(tmp_path):
    path = tmp_path / "results.jsonl"
    config = own("weather", "Weather", recording={"path": str(path)})
    with pytest.raises(UserError, match=r"envs.tools.weather may keep state .*; set envs.tools.weather.stateless="):
        Toolbox(config)
    config.tools["weather"] = config.tools["weather"].model_copy(update={"stateless": True})
    with Toolbox(config) as toolbox, toolbox.episode() as tools:
        for tool in tools:
            await tool.call("Oslo")
    assert json.loads(path.read_text()) == {
        "tool": "weather",
        "arguments": "Oslo",
        "text": "Oslo: 12 degrees",
        "error": None,
    }
