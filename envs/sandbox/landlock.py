"""Landlock: which files, ports and processes the code may reach, whatever the mounts say."""

import os
import stat
import struct
from collections.abc import Sequence

from envs.sandbox import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_QUERY = 1
_PATH_BENEATH = 1

_READ = 0b1101  # execute (shared libraries), read file, read directory
_OF_FILES = 0b111 | 1 << 14  # execute, write, read, truncate: what a rule for a single file may hold
_TCP = 0b11  # bind and connect
_SCOPES = 0b11  # abstract sockets and signals
_ADD = 0b1110 | 1 << 8 | 1 << 14  # read, write, truncate and make plain files
_WRITE = _ADD | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 13  # remove and rename, too, and directories; no devices, fifos, links


def landlock_version() -> int:
    """0 where the kernel has no landlock."""
    try:
        return kernel.system_call("landlock_create_ruleset", _CREATE_RULESET, 0, 0, _VERSION_QUERY)
    except OSError:
        return 0


def restrict_files(
    readable: Sequence[str], *, writable: Sequence[str] = (), addable: Sequence[str] = (), scoped: bool = True
) -> None:
    """Needs no_new_privs. Allows nothing but these files and trees; TCP is forbidden where the kernel can.

    In `addable` plain files can be made and written, and nothing can be removed, so that all of them can be counted.
    `scoped` forbids signals and abstract sockets of processes that are not restricted by the same call.
    """
    version = landlock_version()
    handled = _handled_access(version)
    attributes = struct.pack("=QQQ", handled, _TCP, _SCOPES if scoped else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = kernel.system_call("landlock_create_ruleset", _CREATE_RULESET, attributes, size, 0)
    for paths, access in ((readable, _READ), (writable, _WRITE), (addable, _ADD)):
        for path in paths:
            _allow(ruleset, path, access & handled)
    kernel.system_call("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _handled_access(version: int) -> int:
    bits = 13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16
    return (1 << bits) - 1


def _allow(ruleset: int, path: str, access: int) -> None:
    opened = os.open(path, os.O_PATH)
    try:
        access &= _OF_FILES if not stat.S_ISDIR(os.fstat(opened).st_mode) else access
        rule = struct.pack("=Qi", access, opened)
        kernel.system_call("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(opened)
