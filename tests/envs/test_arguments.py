"""The planner's text as arguments of a tool, for plain schemas and for tools of real MCP servers."""

from typing import Literal, Optional

import pytest
from fastmcp import FastMCP
from mcp.server import MCPServer
from pydantic import BaseModel

from envs.tools.arguments import arguments_of

TEXT, NULL, LIST, WHOLE = {"type": "string"}, {"type": "null"}, {"type": "array"}, {"type": "integer"}
DEFS = {"$defs": {"Q": {"type": "object"}, "T": TEXT, "Self": {"anyOf": [{"$ref": "#/$defs/Self"}] * 9}}}


def of(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required), **DEFS}


OBJECT, TEXT_OR_NULL = {"$ref": "#/$defs/Q"}, {"anyOf": [TEXT, NULL]}
REQUIRED_TEXT = (TEXT, {"$ref": "#/$defs/T"}, {"allOf": [TEXT, {}]}, {"enum": ["a"]}, {"anyOf": [TEXT, TEXT]})
NO_TEXT = ({"anyOf": [LIST, NULL]}, {"oneOf": [WHOLE, LIST]}, {"allOf": [OBJECT]}, {"type": ["integer", "null"]})
NO_TEXT += (OBJECT, {"type": "string", "enum": [1]}, {"const": 5}, WHOLE)
OPTIONAL_TEXT = (TEXT, {}, TEXT_OR_NULL, {"type": ["string", "null"]})
PLAIN = [
    *((text, of(["v"], v=one), {"v": text}) for one in REQUIRED_TEXT for text in ("peru", '{"v": "x"}')),
    *(("peru", of(v=one), {"v": "peru"}) for one in OPTIONAL_TEXT),
    *(('{"v": "x"}', of(v=one), {"v": "x"}) for one in (*OPTIONAL_TEXT, {"$ref": "#/$defs/Self"})),
    *(('{"v": 5}', of(["v"], v=one), {"v": 5}) for one in NO_TEXT),
    ('{"q": "peru", "n": 5}', of(["q"], q=TEXT, n=WHOLE), {"q": "peru", "n": 5}),
    ("peru", of(["q"], q=TEXT, n=WHOLE), None),
    *(("peru", of(v=one), None) for one in (WHOLE, LIST, {"anyOf": [WHOLE, NULL]}, OBJECT)),
    *((text, of(a=WHOLE, b=WHOLE), None) for text in ('{"a": NaN}', "[1]", "", '{"a": 1', "[" * 5000)),
    *((text, {"type": "object", "properties": {}}, {}) for text in ("", "peru", '{"a": 1}')),
    ('{"a": 1}', {"type": "object"}, {"a": 1}),
]


@pytest.mark.parametrize(("text", "schema", "right"), PLAIN)
def test_only_a_single_text_is_given_as_it_is(text, schema, right):
    if right is None:
        with pytest.raises(ValueError):
            arguments_of(text, schema)
    else:
        assert arguments_of(text, schema) == right


class Query(BaseModel):
    words: str


def one(v: str) -> str: ...
def optional(v: Optional[str] = None) -> str: ...  # noqa: UP045
def optional_list(v: Optional[list[str]] = None) -> str: ...  # noqa: UP045
def optional_number(v: int | None = None) -> str: ...
def model(v: Query) -> str: ...
def optional_model(v: Query | None = None) -> str: ...
def either(v: int | list[int]) -> str: ...
def limited(v: str, limit: int = 3) -> str: ...
def choice(v: Literal["a", "b"]) -> str: ...


OFFERED = [
    *((one, "peru", "peru"), (optional, "peru", "peru"), (optional, '{"v": "peru"}', "peru"), (choice, "a", "a")),
    *((optional_list, '{"v": ["a"]}', ["a"]), (optional_number, '{"v": 5}', 5), (either, '{"v": 5}', 5)),
    *((tool, '{"v": {"words": "x"}}', {"words": "x"}) for tool in (model, optional_model)),
    (limited, '{"v": "peru"}', "peru"),
    *((tool, "peru", None) for tool in (limited, model, optional_list)),
]


@pytest.mark.parametrize(("function", "text", "right"), OFFERED)
@pytest.mark.parametrize("sdk", ["fastmcp", "official"])
async def test_tools_of_both_sdks_get_what_the_planner_wrote(sdk, function, text, right):
    server = FastMCP("s") if sdk == "fastmcp" else MCPServer("s")
    (server.tool if sdk == "fastmcp" else server.add_tool)(function)
    [tool] = await server.list_tools()
    schema = tool.parameters if sdk == "fastmcp" else tool.input_schema
    if right is None:
        with pytest.raises(ValueError):
            arguments_of(text, schema)
    else:
        assert arguments_of(text, schema) == {"v": right}
