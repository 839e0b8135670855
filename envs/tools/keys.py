"""The API keys of tools."""

from configs.api_keys import ApiKeyError, find_key, how_to_set
from configs.errors import UserError


class UserError(UserError):
    """A tool cannot be switched on as the configuration asks; the message says what to set."""


def read_key(tool: str, variable: str, otherwise: str) -> str:
    """The key that `configs.api_keys.find_key` finds. Raises UserError, which never quotes it; `otherwise` says
    how to do without."""
    try:
        key = find_key(variable)
    except ApiKeyError as error:
        raise UserError(f"{tool}: {error}") from None
    if key is None:
        raise UserError(f"{tool} needs {variable}: {how_to_set(variable)}, {otherwise}")
    return key
