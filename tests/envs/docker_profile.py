"""Launcher of a command under an emulation of Docker's default profile: its capabilities, without its refused calls.

    python tests/envs/docker_profile.py [--seccomp FILE] COMMAND ...

It covers the parts that matter to a sandbox: no new namespaces, no mounts, and 14 capabilities. With --seccomp only the
calls that this profile refuses are refused.
"""

import argparse
import ctypes
import errno
import json
import os
import struct
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from envs import kernel
from envs.kernel import restrict_calls

# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD,
# AUDIT_WRITE, SETFCAP
CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
REFUSED = {
    "pivot_root": 155, "mount": 165, "umount2": 166, "unshare": 272, "setns": 308, "bpf": 321, "perf_event_open": 298,
    "add_key": 248, "request_key": 249, "keyctl": 250, "userfaultfd": 323, "io_uring_setup": 425, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
}  # fmt: skip
NUMBERS = REFUSED | {
    "acct": 163, "adjtimex": 159, "clock_adjtime": 305, "clock_settime": 227, "delete_module": 176,
    "fanotify_init": 300, "finit_module": 313, "init_module": 175, "io_uring_enter": 426, "io_uring_register": 427,
    "ioperm": 173, "iopl": 172, "kcmp": 312, "kexec_file_load": 320, "kexec_load": 246, "lookup_dcookie": 212,
    "open_by_handle_at": 304, "quotactl": 179, "reboot": 169, "settimeofday": 164, "swapoff": 168, "swapon": 167,
    "syslog": 103, "vhangup": 153,
}  # fmt: skip
_CLONE, _CLONE3, _NEW_NAMESPACES = 56, 435, 0x7E020000
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_SYS_CAPSET, _CAPABILITY_VERSION_3 = 126, 0x20080522
_PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4


def enter_docker_profile(profile: Path | None) -> None:
    """Enter the profile, without no_new_privs as in Docker if this process has the right."""
    program = _filter_of(profile) if profile else _filter_program()
    try:
        restrict_calls(program)
    except PermissionError:
        kernel.forbid_new_privileges()
        restrict_calls(program)
    if os.geteuid() == 0:
        _keep_capabilities()


def _filter_program() -> bytes:
    program = [(_LOAD, 0, 0, 0)]
    for number in REFUSED.values():
        program += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    program += [(_IF_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    program += [(_IF_EQUAL, 0, 3, _CLONE), (_LOAD, 0, 0, 16), (_IF_ANY_BIT, 0, 1, _NEW_NAMESPACES)]
    program += [(_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _filter_of(profile: Path) -> bytes:
    """Return the filter of a profile that allows all calls except a list."""
    rules = json.loads(profile.read_text())
    (refusing,) = rules["syscalls"]
    if (rules["defaultAction"], refusing["action"]) != ("SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"):
        raise ValueError(f"{profile} is more than a list of refused calls")
    program = [(_LOAD, 0, 0, 0)]
    for name in refusing["names"]:
        program += [(_IF_EQUAL, 0, 1, NUMBERS[name]), (_RETURN, 0, 0, _ERRNO | refusing["errnoRet"])]
    program += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _keep_capabilities() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in set(range(41)) - set(CAPABILITIES):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    kept = sum(1 << capability for capability in CAPABILITIES)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    kernel.system_call("capset", _SYS_CAPSET, header, (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seccomp", type=Path, metavar="FILE", help="a seccomp profile instead of Docker's")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    enter_docker_profile(options.seccomp)
    os.execvp(options.command[0], options.command)
