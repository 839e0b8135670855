"""Linux calls that the standard library lacks, each of which raises OSError with the call's name, and their walls.

Landlock limits files, ports and processes; seccomp limits system calls.
"""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1 << 5, 1 << 12, 1 << 14, 1 << 18, 1 << 21
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_SYS_CAPSET, _SYS_PIVOT_ROOT = 126, 155
_CAPABILITY_VERSION_3 = 0x20080522
_NUM_CAPABILITIES = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(name: str, result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def system_call(name: str, number: int, *arguments: object) -> int:
    """Make a system call. Integers are 64-bit words, bytes and ctypes buffers pointers."""
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    return _checked(name, _libc.syscall(ctypes.c_long(number), *words))


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _checked(f"mount {target}", _libc.mount(*arguments))


def detach(target: str) -> None:
    _checked(f"umount {target}", _libc.umount2(target.encode(), _MNT_DETACH))


def pivot_root(new_root: str, old_root: str) -> None:
    system_call("pivot_root", _SYS_PIVOT_ROOT, new_root.encode(), old_root.encode())


def exchange(first: str, second: str) -> None:
    """Exchange two files or folders, so that both names exist at any time. Not every file system can."""
    _checked("renameat2", _libc.renameat2(_AT_FDCWD, first.encode(), _AT_FDCWD, second.encode(), _RENAME_EXCHANGE))


def return_memory() -> None:
    """Return freed memory to the system, of which the C library keeps gigabytes after tensors of many sizes."""
    _libc.malloc_trim(ctypes.c_size_t(0))


def _prctl(name: str, option: int, value: int) -> None:
    _checked(name, _libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))))


def die_with_parent(signal_number: int) -> None:
    """Send this signal at the death of the parent's thread. A change of user clears it, so set it last."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own. A fork does not inherit this."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def set_dumpable(dumpable: bool) -> None:
    """Set it after a change of user, or /proc/self belongs to root; unset it to keep crashes from the core handler."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, int(dumpable))


def forbid_new_privileges() -> None:
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    for capability in range(_NUM_CAPABILITIES):
        try:
            _prctl("PR_CAPBSET_DROP", _PR_CAPBSET_DROP, capability)
        except OSError:  # past the last capability of this kernel, or no right to drop it: capset decides
            break
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    system_call("capset", _SYS_CAPSET, header, (ctypes.c_uint32 * 6)())


# --- Landlock ---

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_QUERY = 1
_PATH_BENEATH = 1

READ = 0b1101  # execute (shared libraries), read file, read directory
ADD = 0b1110 | 1 << 8 | 1 << 14  # read, write, truncate and make plain files, but not remove them: all can be counted
WRITE = ADD | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 13  # remove and rename, too, and directories; no devices, fifos, links
_OF_FILES = 0b111 | 1 << 14  # execute, write, read, truncate: the rights that a rule for a single file may have
_TCP = 0b11  # bind and connect
_CAPABILITIES_THAT_READ_MEMORY = (21, 38)  # CAP_SYS_ADMIN and CAP_PERFMON, whatever landlock says
_SCOPES, _SIGNALS = 0b11, 0b10  # abstract sockets and signals
SCOPED_VERSION = 6
"""First version of Landlock that confines signals and abstract sockets, in Linux 6.12."""


def landlock_version() -> int:
    """Return the version of Landlock, 0 without it."""
    try:
        return system_call("landlock_create_ruleset", _CREATE_RULESET, 0, 0, _VERSION_QUERY)
    except OSError:
        return 0


def restrict_files(rights: Mapping[str, int], *, scoped: bool = True) -> None:
    """Allow only these rights on files and trees, and forbid TCP if the kernel can. Needs no_new_privs.

    `scoped` also forbids signals and abstract sockets of processes that this call does not restrict.
    """
    version = landlock_version()
    num_access_bits = 13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16
    handled = (1 << num_access_bits) - 1
    attributes = struct.pack("=QQQ", handled, _TCP, _SCOPES if scoped else 0)
    size = 8 if version < 4 else 16 if version < SCOPED_VERSION else 24
    ruleset = system_call("landlock_create_ruleset", _CREATE_RULESET, attributes, size, 0)
    for path, access in rights.items():
        opened = os.open(path, os.O_PATH)
        allowed = access & handled & (handled if stat.S_ISDIR(os.fstat(opened).st_mode) else _OF_FILES)
        system_call("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed, opened), 0)
        os.close(opened)
    system_call("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def restrict_processes() -> None:
    """Forbid to signal or trace processes other than descendants, and so to read their environment and memory.

    Complete after the next exec. Needs no_new_privs and SCOPED_VERSION: a limit of files would also forbid mounts.
    """
    for capability in _CAPABILITIES_THAT_READ_MEMORY:
        with suppress(OSError):  # only root has these, and may drop them
            _prctl("PR_CAPBSET_DROP", _PR_CAPBSET_DROP, capability)
    ruleset = system_call("landlock_create_ruleset", _CREATE_RULESET, struct.pack("=QQQ", 0, 0, _SIGNALS), 24, 0)
    system_call("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


# --- seccomp ---

_SECCOMP, _SET_MODE_FILTER, _GET_ACTION_AVAIL = 317, 1, 2
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_X86_64 = 0xC000003E
_X32_BIT = 0x40000000
_IOCTL = 16

# Calls that computing in Python needs, with their x86_64 numbers. Absent on purpose: processes and threads (clone,
# fork, exec), sockets, signals to others, links, mounts, namespaces, tracing, memfd, io_uring, bpf, keys, rlimits; and
# calls that landlock allows although they change or reveal files outside (utimensat, readlink).
CELL_CALLS = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
    "rt_sigreturn": 15, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "select": 23,
    "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33, "nanosleep": 35, "getpid": 39,
    "exit": 60, "uname": 63, "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77,
    "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83, "rmdir": 84, "unlink": 87,
    "umask": 95, "gettimeofday": 96, "getrusage": 98, "sysinfo": 99, "times": 100,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131,
    "gettid": 186, "time": 201, "sched_getaffinity": 204, "getdents64": 217,
    "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "renameat": 264,
    "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273,
    "dup3": 292, "renameat2": 316, "getrandom": 318, "statx": 332, "rseq": 334,
    "faccessat2": 439,
}  # fmt: skip

# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL and F_DUPFD_CLOEXEC. Without the locks, leases, owners and signals of
# descriptors: those act across files that several cells read.
_FCNTL_COMMANDS = frozenset({0, 1, 2, 3, 4, 1030})
# WAIT, WAKE, REQUEUE, CMP_REQUEUE, WAKE_OP, WAIT_BITSET, WAKE_BITSET, and WAIT_BITSET by the wall clock. Private
# futexes only: a shared futex may be in a file that several cells read.
_FUTEX_OPERATIONS = frozenset({128, 129, 131, 132, 133, 137, 138, 393})

Chosen = Mapping[int, tuple[int, frozenset[int]]]
"""Number of a call -> index of an argument of 32 bits, and its allowed values."""
KILL = 62
CELL_CHOSEN: Chosen = {72: (1, _FCNTL_COMMANDS), 202: (1, _FUTEX_OPERATIONS)}

_TMPFILE = 0o20000000
CELL_WITHOUT: Mapping[int, tuple[int, int]] = {2: (1, _TMPFILE), 257: (2, _TMPFILE)}
"""Number of a call -> index of an argument, and its forbidden bits: `open` must not make a file without a name."""

WARDEN_CALLS = {
    "read": 0, "write": 1, "close": 3, "fstat": 5, "poll": 7, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11,
    "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "mremap": 25, "madvise": 28,
    "getpid": 39, "sendto": 44, "recvfrom": 45, "shutdown": 48, "wait4": 61, "fstatfs": 138, "sigaltstack": 131,
    "getdents64": 217, "restart_syscall": 219, "clock_gettime": 228, "exit_group": 231, "newfstatat": 262,
    "getrandom": 318,
}  # fmt: skip
"""Calls of a warden after the start of its cell; it does not open files any more."""


def seccomp_available() -> bool:
    with suppress(OSError):
        system_call("seccomp", _SECCOMP, _GET_ACTION_AVAIL, 0, ctypes.byref(ctypes.c_uint32(_KILL_PROCESS)))
        return True
    return False


def filter_program(allowed: Mapping[str, int], chosen: Chosen, without: Mapping[int, tuple[int, int]]) -> bytes:
    """Return a seccomp filter. Calls of other architectures (int 0x80) and x32 end the process."""
    program = [
        (_LOAD, 0, 0, _ARCH_OFFSET),
        (_IF_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_IF_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL_PROCESS),
    ]
    for number in allowed.values():
        program += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, (argument, values) in chosen.items():
        choices = [(_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * argument)]
        for value in sorted(values):
            choices += [(_IF_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
        choices += [(_RETURN, 0, 0, _ERRNO | errno.EPERM)]
        program += [(_IF_EQUAL, 0, len(choices), number), *choices]
    for number, (argument, bits) in without.items():
        program += [(_IF_EQUAL, 0, 4, number), (_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * argument)]
        program += [(_IF_ANY_BIT, 0, 1, bits), (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    # ioctl fails with "not a terminal"; another error would make harmless calls of the library fail.
    program += [(_IF_EQUAL, 0, 1, _IOCTL), (_RETURN, 0, 0, _ERRNO | errno.ENOTTY)]
    program += [(_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def restrict_calls(program: bytes) -> None:
    """Install a filter, which this process cannot undo. Needs no_new_privs."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    system_call("seccomp", _SECCOMP, _SET_MODE_FILTER, 0, header)
