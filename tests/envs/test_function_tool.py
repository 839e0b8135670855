"""Plain and async functions as tools: description, arguments, grammar and results."""

import asyncio
import functools
import sys
import threading
from typing import Any, Literal, Optional

import pytest

from configs.envs import EnvsConfig
from configs.errors import UserError
from configs.run import RunConfig
from envs.tools.function_tool import function_schemas
from envs.tools.toolbox import Toolbox
from envs.types import ToolCall, ToolResult, ToolUnavailableError
from rollout.agent.agent import Agent
from rollout.agent.planner import FormatError, parse_decision, planner_grammar, planner_schema, system_prompt
from rollout.chat import ChatFormat
from tests.rollout.scripted import ScriptedEngine, ScriptedTokenizer, make_task


def weather(city: str, days: int = 3, unit: Literal["C", "F"] = "C") -> str:
    """The forecast
    of a city.

    This paragraph is for people.
    """
    return f"{city}, {days} days in {unit}"


def shout(text: str) -> str:
    """Write it in capitals."""
    return text.upper()


async def mean(values: list[float], weights: Optional[list[float]], exact: bool) -> dict[str, object]:  # noqa: UP045
    """The mean of numbers."""
    await asyncio.sleep(0)
    return {"mean": sum(values) / len(values), "weights": weights, "exact": exact}


def now():
    """The time."""
    return "noon"


def fails(city: str, reason: str):
    """Never works."""
    raise KeyError(f"no {city}\nand {reason}")


def gives_up(city: str):
    """Its service is gone."""
    raise ToolUnavailableError("down")


def distances(city: str):
    """The distances of pairs."""
    return {(city, "Bergen"): 463}


def finds(city: str):
    """Finds nothing."""
    return next(iter(()))


def leaves(city: str):
    """Tries to end the process."""
    sys.exit(3)


def refuses(city: str):
    """Returns an error itself."""
    return ToolResult(text="no such city", error="unknown_city")


def where(city: str):
    """The thread that it runs in."""
    return threading.current_thread() is threading.main_thread()


def plots(function: str, given: int = 1):
    """Has arguments with the names of internal variables."""
    return f"{function} {given}"


def spells(words: list[str], last: str = ""):
    """Spells words."""
    return ascii([*words, last])


def around(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


wrapped_mean = around(mean)


def undocumented(city: str):
    return city


def untyped(city, days: int):
    """One argument has no type."""


def of_anything(value: Any):
    """Any type."""


def of_pairs(pairs: list[tuple[int, int]]):
    """A list of pairs."""


def of_many(*cities: str):
    """Variadic."""


def of_an_unknown_type(city: "NoSuchType"):  # noqa: F821
    """An unknown type."""


def config(*names):
    tools = {name: {"source": f"{__name__}:{name}"} for name in names}
    return EnvsConfig(actions=("think", *names, "answer"), tools=tools)


async def call(name, arguments):
    with Toolbox(config(name)) as toolbox, toolbox.episode() as tools:
        return await tools[1].call(arguments)


def test_the_prompt_shows_docstring_and_typed_arguments():
    with Toolbox(config("weather", "shout", "mean", "now")) as toolbox, toolbox.episode() as tools:
        assert system_prompt(tools).splitlines()[2:-1] == [
            """weather: The forecast of a city. {"city": str, "days": int = 3, "unit": Literal['C', 'F'] = 'C'}""",
            "shout: Write it in capitals.",
            """mean: The mean of numbers. {"values": list[float], "weights": Optional[list[float]], "exact": bool}""",
            "now: The time. {}",
        ]


def test_arguments_become_a_schema_unless_they_are_one_text():
    schemas = function_schemas(config("weather", "shout", "mean"))
    assert schemas.keys() == {"weather", "mean"}
    assert schemas["weather"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]},
        },
        "required": ["city", "days", "unit"],
        "additionalProperties": False,
    }
    numbers = {"type": "array", "items": {"type": "number"}}
    assert schemas["mean"]["properties"] == {
        "values": numbers,
        "weights": {"anyOf": [numbers, {"type": "null"}]},
        "exact": {"type": "boolean"},
    }


def test_a_class_and_a_server_have_no_schema():
    tools = {
        "weather": {"source": "tests.envs.test_toolbox:Weather"},
        "lookup": {"source": "mcp:https://example.org/mcp", "description": "look it up"},
    }
    assert function_schemas(EnvsConfig(actions=("weather", "lookup", "answer"), tools=tools)) == {}


async def test_arguments_reach_the_function_and_null_is_its_default():
    assert (await call("weather", '{"city":"Oslo","days":2,"unit":null}')).text == "Oslo, 2 days in C"
    assert (await call("weather", '{"city":"Oslo"}')).text == "Oslo, 3 days in C"
    assert (await call("shout", "as it is {")).text == "AS IT IS {"
    assert (await call("now", "{}")) == ToolResult(text="noon", foreign=True)
    for name in ("mean", "wrapped_mean"):
        result = await call(name, '{"values":[1,2.5],"weights":null,"exact":true}')
        assert result.text == '{"mean": 1.75, "weights": null, "exact": true}'


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ('{"city":1}', "city"),
        ('{"city":"x","days":"2"}', "days"),
        ('{"city":"x","days":true}', "days"),
        ('{"city":"x","unit":"K"}', "unit"),
        ('{"days":1}', "city"),
        ('{"city":"x","where":1}', "where"),
        ("Oslo", "JSON"),
        ("[1]", "JSON"),
    ],
)
async def test_wrong_arguments_are_a_result_of_one_line(arguments, wrong):
    result = await call("weather", arguments)
    assert (result.error, wrong in result.text, "\n" in result.text) == ("bad_arguments", True, False)


async def test_names_threads_and_values_that_json_lacks():
    assert (await call("plots", '{"function":"x^2","given":2}')).text == "x^2 2"
    assert (await call("distances", "Oslo")).text == "{('Oslo', 'Bergen'): 463}"
    # A plain function does not block the event loop.
    assert (await call("where", "Oslo")).text == "false"
    result = await call("spells", r'{"words":["\ud83d","\ud83d\ude00"],"last":"\udc00"}')
    assert result.text == r"['?', '\U0001f600', '?']"


async def test_a_key_in_an_exception_is_redacted(monkeypatch):
    monkeypatch.setenv("WEATHER_API_KEY", "no Oslo, no Bergen")
    result = await call("fails", '{"city":"Oslo, no Bergen","reason":"at https://x/?k=no+Oslo%2C+no+Bergen"}')
    assert result.text.count("[WEATHER_API_KEY]") == 2
    assert "Bergen" not in result.text


async def test_an_exception_is_a_result_of_one_line():
    result = await call("fails", '{"city":"Oslo","reason":"that"}')
    assert (result.text, result.error) == (r"KeyError: 'no Oslo\nand that'", "tool_error")
    assert "SystemExit" in (await call("leaves", "Oslo")).text
    assert "StopIteration" in (await call("finds", "Oslo")).text
    assert (await call("refuses", "Oslo")) == ToolResult(text="no such city", error="unknown_city", foreign=True)
    with pytest.raises(ToolUnavailableError, match="down"):
        await call("gives_up", "Oslo")


UNFIT = ("undocumented", "untyped", "of_anything", "of_pairs", "of_many", "of_an_unknown_type")


@pytest.mark.parametrize("name", UNFIT)
def test_a_function_that_cannot_be_a_tool_is_refused_in_one_line(name):
    with pytest.raises(UserError, match=rf"^envs\.tools\.{name}: '.*:{name}': ") as caught:
        Toolbox(config(name))
    assert "\n" not in str(caught.value)


# Grammar


ACTIONS = ("think", "weather", "mean", "shout", "answer")
SCHEMAS = function_schemas(config("weather", "mean", "shout"))


def turn(action, action_input):
    return f'{{"thought":"t","action":"{action}","action_input":{action_input}}}'


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (turn("weather", r'{"city":"\"Oslo\"","days":null,"unit":"F"}'), True),
        (turn("mean", '{"values":[],"weights":[1,-0.5],"exact":true}'), True),
        (turn("shout", '"hello"'), True),
        (turn("answer", '"4"'), True),
        (turn("weather", '"Oslo"'), False),
        (turn("answer", '{"city":"Oslo","days":3,"unit":"F"}'), False),
        (turn("weather", '{"city":"Oslo"}'), False),
        (turn("weather", '{"city":"Oslo","days":3,"unit":"K"}'), False),
        (turn("weather", '{"days":3,"city":"Oslo","unit":"C"}'), False),
    ],
)
def test_the_grammar_accepts_exactly_the_typed_arguments(text, right):
    xgrammar = pytest.importorskip("xgrammar")
    grammar = xgrammar.Grammar.from_ebnf(planner_grammar(ACTIONS, SCHEMAS))
    assert xgrammar.testing._is_grammar_accept_string(grammar, text) == right
    if right:
        assert parse_decision(text, ACTIONS, SCHEMAS).to_json() == text


def test_a_decision_holds_an_object_only_for_typed_arguments():
    text = turn("weather", '{"city": "Øst", "days": 3, "unit": "F"}')
    assert parse_decision(text, ACTIONS, SCHEMAS).arguments == '{"city":"Øst","days":3,"unit":"F"}'
    for wrong in (turn("weather", '"Oslo"'), turn("answer", "{}"), turn("weather", '{"city":"a","city":"b"}')):
        with pytest.raises(FormatError):
            parse_decision(wrong, ACTIONS, SCHEMAS)


def test_a_server_gets_the_same_schemas():
    given = planner_schema(ACTIONS, SCHEMAS)["properties"]["action_input"]["anyOf"]
    assert given == [{"type": "string"}, SCHEMAS["weather"], SCHEMAS["mean"]]
    # The last step may only answer.
    assert planner_schema(("answer",), SCHEMAS) == planner_schema(("answer",))
    assert planner_grammar(("answer",), SCHEMAS) == planner_grammar(("answer",))


async def test_an_attempt_calls_the_function_with_typed_arguments():
    envs = config("weather")
    engine = ScriptedEngine([turn("weather", '{"city":"Oslo","days":2,"unit":null}'), turn("answer", '"rain"')])
    with Toolbox(envs) as toolbox:
        agent = Agent(
            config=RunConfig(envs=envs),
            engine=engine,
            chat=ChatFormat(ScriptedTokenizer()),
            tools_for_episode=toolbox.episode,
            temperature=1.0,
        )
        trajectory = await agent.run(make_task(), trajectory_id="g/0", group_id="g")
    first = trajectory.turns[0]
    assert first.grammar == planner_grammar(envs.actions, function_schemas(envs))
    assert first.tool_call == ToolCall(name="weather", arguments='{"city":"Oslo","days":2,"unit":null}')
    assert first.tool_result == ToolResult(text="Oslo, 2 days in C", foreign=True)
    assert trajectory.answer == "rain"
