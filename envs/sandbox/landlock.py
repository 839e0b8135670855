"""Landlock: which files, ports and processes the code may reach, whatever the mounts say."""

import os
import struct
from collections.abc import Sequence

from envs.sandbox import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_QUERY = 1
_PATH_BENEATH = 1

_READ = 0b1101  # execute (shared libraries), read file, read directory
_TCP = 0b11  # bind and connect
_SCOPES = 0b11  # abstract sockets and signals
_WRITE = 0b1110 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13 | 1 << 14  # no devices, sockets, fifos, links


def landlock_version() -> int:
    """0 where the kernel has no landlock."""
    try:
        return kernel.system_call("landlock_create_ruleset", _CREATE_RULESET, 0, 0, _VERSION_QUERY)
    except OSError:
        return 0


def restrict_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Needs no_new_privs. Allows nothing but these trees; TCP, foreign signals and sockets where known."""
    version = landlock_version()
    handled = _handled_access(version)
    attributes = struct.pack("=QQQ", handled, _TCP, _SCOPES)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = kernel.system_call("landlock_create_ruleset", _CREATE_RULESET, attributes, size, 0)
    for paths, access in ((readable, _READ), (writable, _WRITE)):
        for path in paths:
            _allow(ruleset, path, access & handled)
    kernel.system_call("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _handled_access(version: int) -> int:
    bits = 13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16
    return (1 << bits) - 1


def _allow(ruleset: int, path: str, access: int) -> None:
    directory = os.open(path, os.O_PATH)
    try:
        rule = struct.pack("=Qi", access, directory)
        kernel.system_call("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(directory)
