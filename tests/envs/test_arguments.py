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


PLAIN = [
    *(("peru", of(["v"], v=one), {"v": "peru"}) for one in (TEXT, {"$ref": "#/$defs/T"}, {"allOf": [TEXT, {}]})),
    *(('{"v": "x"}', of(["v"], v=one), {"v": '{"v": "x"}'}) for one in (TEXT, {"anyOf": [TEXT, TEXT]})),
    *(("peru", of(v=one), {"v": "peru"}) for one in (TEXT, {}, {"anyOf": [TEXT, NULL]}, {"type": ["string", "null"]})),
    *(('{"v": "x"}', of(v=one), {"v": "x"}) for one in (TEXT, {}, {"anyOf": [TEXT, NULL]}, {"$ref": "#/$defs/Self"})),
    *(('{"v": "x"}', of(v={"$ref": to}), {"v": "x"}) for to in ("https://x.example/y.json", "#/$defs/Unknown")),
    *(
        ('{"v": 5}', of(["v"], v=one), {"v": 5})
        for one in (
            *(
                {"anyOf": [LIST, NULL]},
                {"oneOf": [WHOLE, LIST]},
                {"$ref": "#/$defs/Q"},
                {"allOf": [{"$ref": "#/$defs/Q"}]},
            ),
            *({"type": ["integer", "null"]}, {"const": 5}, WHOLE),
        )
    ),
    ('{"q": "peru", "n": 5}', of(["q"], q=TEXT, n=WHOLE), {"q": "peru", "n": 5}),
    ("peru", of(["q"], q=TEXT, n=WHOLE), None),
    *(("peru", of(v=one), None) for one in (WHOLE, LIST, {"anyOf": [WHOLE, NULL]}, {"$ref": "#/$defs/Q"})),
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
    *(
        (limited, '{"v": "peru"}', "peru"),
        (limited, "peru", None),
        (model, "peru", None),
        (optional_list, "peru", None),
    ),
]


@pytest.mark.parametrize(("function", "text", "right"), OFFERED)
@pytest.mark.parametrize("sdk", ["fastmcp", "official"])
async def test_tools_of_both_sdks_get_what_the_planner_wrote(sdk, function, text, right):
    if sdk == "fastmcp":
        server = FastMCP("s")
        server.tool(function)
        (tool,) = await server.list_tools()
        schema = tool.parameters
    else:
        server = MCPServer("s")
        server.add_tool(function)
        (tool,) = await server.list_tools()
        schema = tool.input_schema
    if right is None:
        with pytest.raises(ValueError):
            arguments_of(text, schema)
    else:
        assert arguments_of(text, schema) == {"v": right}
