"""The planner's text as arguments of a tool, for plain schemas and for tools of real MCP servers."""

from typing import Literal, Optional

import pytest
from fastmcp import FastMCP
from mcp.server import MCPServer
from pydantic import BaseModel

from envs.tools.arguments import arguments_of

TEXT, NULL, LIST, WHOLE = {"type": "string"}, {"type": "null"}, {"type": "array"}, {"type": "integer"}


def of(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


AS_TEXT = '{"v": "x"}'
MAYBE_TEXT = ({"anyOf": [TEXT, NULL]}, {"type": ["string", "null"]}, {}, TEXT, {"$ref": "#/$defs/T"})
NO_TEXT = ({"anyOf": [LIST, NULL]}, {"type": ["integer", "null"]}, WHOLE)
ONE = [
    *((["v"], (TEXT, {"anyOf": [TEXT, TEXT]}), text, {"v": text}) for text in ("peru", AS_TEXT)),
    ([], MAYBE_TEXT, "peru", {"v": "peru"}),
    ([], MAYBE_TEXT, AS_TEXT, {"v": "x"}),
    (["v"], NO_TEXT, '{"v": 5}', {"v": 5}),
    (["v"], NO_TEXT, "peru", None),
]
PLAIN = [
    *((text, of(required, v=one), right) for required, schemas, text, right in ONE for one in schemas),
    ('{"q": "peru", "n": 5}', of(["q"], q=TEXT, n=WHOLE), {"q": "peru", "n": 5}),
    ("peru", of(["q"], q=TEXT, n=WHOLE), None),
    *((text, of(a=WHOLE, b=WHOLE), None) for text in ('{"a": NaN}', "[1]", "", '{"a": 1', "[" * 5000)),
    *((text, {"type": "object", "properties": {}}, {}) for text in ("", "peru", '{"a": 1}')),
    ('{"a": 1}', {"type": "object"}, {"a": 1}),
]


def check(text, schema, right):
    if right is None:
        with pytest.raises(ValueError):
            arguments_of(text, schema)
    else:
        assert arguments_of(text, schema) == right


@pytest.mark.parametrize(("text", "schema", "right"), PLAIN)
def test_only_a_single_text_is_given_as_it_is(text, schema, right):
    check(text, schema, right)


class Query(BaseModel):
    words: str


def one(v: str) -> str: ...
def optional(v: Optional[str] = None) -> str: ...  # noqa: UP045
def optional_list(v: Optional[list[str]] = None) -> str: ...  # noqa: UP045
def optional_model(v: Query | None = None) -> str: ...
def either(v: int | list[int]) -> str: ...
def limited(v: str, limit: int = 3) -> str: ...
def choice(v: Literal["a", "b"]) -> str: ...


OFFERED = [
    *((one, "peru", {"v": "peru"}), (optional, "peru", {"v": "peru"}), (optional, AS_TEXT, {"v": "x"})),
    *((choice, "a", {"v": "a"}), (limited, AS_TEXT, {"v": "x"}), (limited, "peru", None)),
    *((optional_list, '{"v": ["a"]}', {"v": ["a"]}), (optional_list, "peru", None), (either, '{"v": 5}', {"v": 5})),
    (optional_model, '{"v": {"words": "x"}}', {"v": {"words": "x"}}),
]


@pytest.mark.parametrize(("function", "text", "right"), OFFERED)
async def test_tools_of_both_sdks_get_what_the_planner_wrote(function, text, right):
    fast, official = FastMCP("s"), MCPServer("s")
    fast.tool(function)
    official.add_tool(function)
    check(text, (await fast.list_tools())[0].parameters, right)
    check(text, (await official.list_tools())[0].input_schema, right)
