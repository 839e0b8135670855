"""API keys: from the environment, and from nowhere else."""

import os


class ToolSetupError(ValueError):
    """A tool cannot be switched on as the configuration asks; the message says what to set."""


def read_key(tool: str, variable: str, otherwise: str) -> str:
    """The key in an environment variable. Raises ToolSetupError, which never quotes it; `otherwise` says how to do
    without."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ToolSetupError(f"{tool} needs {variable}: set {variable} in the environment, {otherwise}")
    # What a header cannot carry would be quoted, key and all, by the HTTP client's own error.
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ToolSetupError(f"{variable} holds no API key: it has a character that no key has")
    return key
