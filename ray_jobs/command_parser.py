"""argparse, with errors of one line, and a guess at what was meant."""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from configs.spelling import did_you_mean


class CommandParser(argparse.ArgumentParser):
    """`commands` are set once all of them are added."""

    commands: "Mapping[str, CommandParser]" = {}

    def command(self, arguments: Sequence[str]) -> "tuple[CommandParser, list[str]]":
        """The parser of the command that is named, and the arguments; `help COMMAND`, `help` and nothing at all ask for
        help. Ends the process at an unknown command."""
        given = list(arguments) or ["help"]
        if given[0] == "help":
            given = [*given[1:2], "--help"]
        name = given[0]
        if name not in self.commands and not name.startswith("-"):
            near = did_you_mean(name, self.commands)
            self._end(f"unknown command '{name}'; `agentflow help` lists them{near}")
        return self.commands.get(name, self), given

    def refuse(self, arguments: Sequence[str]) -> NoReturn:
        """Ends the process at arguments that nothing takes."""
        near = did_you_mean(arguments[0].partition("=")[0], self._option_string_actions)
        self._end(f"unrecognized arguments: {' '.join(arguments)}; `{self.prog} --help` says what there is{near}")

    def error(self, message: str) -> NoReturn:
        self._end(f"{message}; `{self.prog} --help` says what there is")

    def _end(self, message: str) -> NoReturn:
        self.exit(2, f"agentflow: error: {message}\n")


def whole_number(text: str) -> int:
    """The type of an option that counts something. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got '{text}'")
    return int(text)


def seconds(text: str) -> float:
    """The type of an option that is a time. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got '{text}'")
    return value
