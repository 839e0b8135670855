"""Where an MCP server is, and the key that it wants."""

import shlex
from dataclasses import dataclass, field
from urllib.parse import urlsplit

SCHEME = "mcp:"


class McpAddressError(ValueError):
    """An address that names no MCP server; the message says what one looks like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpAddress:
    """Where a server is: a URL or a command with its arguments; and which of its tools, if not its only one."""

    url: str | None
    command: tuple[str, ...]
    tool: str | None

    @classmethod
    def parse(cls, text: str) -> "McpAddress":
        """Read `mcp:https://host/path#tool` or `mcp:command with arguments#tool`. Raises McpAddressError."""
        target, _, tool = text.removeprefix(SCHEME).partition("#")
        if target.startswith(("http://", "https://")) and urlsplit(target).hostname:
            return cls(url=target, command=(), tool=tool or None)
        try:
            command = tuple(shlex.split(target))
        except ValueError as error:
            raise McpAddressError(f"'{text}' is no command line: {error}") from None
        if not text.startswith(SCHEME) or not command or "://" in command[0]:
            raise McpAddressError(
                f"'{text}' names no MCP server; write mcp:https://host/path or mcp:command, and add #name for one tool"
            )
        return cls(url=None, command=command, tool=tool or None)

    def __str__(self) -> str:
        """For messages: without what a URL may hold of secrets."""
        if self.url is None:
            return f"'{self.command[0]}'"
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"


@dataclass(frozen=True, slots=True)
class McpKey:
    """A server's API key, and the variable that a command gets it in. Neither `repr` nor `str` shows it."""

    variable: str
    value: str = field(repr=False)
