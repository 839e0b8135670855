"""Runs one Python file in the sandbox, the way the agent's code tool would."""

import sys
from pathlib import Path

from envs.sandbox import Sandbox, SandboxRefusedError
from envs.types import ToolUnavailableError


def main(path: str, timeout_s: float = 5.0) -> int:
    """Prints what the code says, and the walls around it on stderr. 0 if it ended without an error, else 1."""
    try:
        code = Path(path).read_text(encoding="utf-8")
        with Sandbox() as sandbox:
            print(f"code sandbox: {sandbox.state}", file=sys.stderr)
            result = sandbox.run(code, timeout_s=timeout_s)
    except (OSError, UnicodeDecodeError, SandboxRefusedError, ToolUnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(result.text, end="" if result.text.endswith("\n") else "\n")
    if result.error:
        print(f"error: {result.error}", file=sys.stderr)
    return 1 if result.error else 0
