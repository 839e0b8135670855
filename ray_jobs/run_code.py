"""Runs one Python file in the sandbox, the way the agent's code tool would."""

import sys
from pathlib import Path

from configs.wording import reason
from envs.sandbox import Sandbox
from envs.types import ToolUnavailableError


class CodeFileError(RuntimeError):
    """The file to run cannot be read; the message says why."""


def main(path: str, timeout_s: float = 5.0) -> int:
    """Prints what the code says, and the walls around it on stderr. 0 if it ended without an error, else 1. Raises
    CodeFileError and SandboxRefusedError."""
    try:
        code = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CodeFileError(f"'{path}' cannot be read: {reason(error)}; name a Python file in UTF-8") from error
    try:
        with Sandbox() as sandbox:
            print(f"code sandbox: {sandbox.state}", file=sys.stderr)
            result = sandbox.run(code, timeout_s=timeout_s)
    except ToolUnavailableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(result.text, end="" if result.text.endswith("\n") else "\n")
    if result.error:
        print(f"error: {result.error}", file=sys.stderr)
    return 1 if result.error else 0
