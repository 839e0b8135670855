"""Linux calls that the standard library lacks; each raises OSError with the call's name."""

import ctypes
import os

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1 << 5, 1 << 12, 1 << 14, 1 << 18, 1 << 21
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
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
    """Make a system call. Integers are passed as 64-bit words, bytes and ctypes buffers as pointers."""
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


def _prctl(name: str, option: int, value: int) -> None:
    words = [ctypes.c_ulong(word) for word in (value, 0, 0, 0)]
    _checked(name, _libc.prctl(option, *words))


def die_with_parent(signal_number: int) -> None:
    """Send this signal at the death of the parent's thread. A change of user clears it, so set it last."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal_number)


def set_dumpable(dumpable: bool) -> None:
    """Set whether the process is dumpable.

    It must be True after a change of user, or /proc/self belongs to root. False keeps crashes from the host's core
    handler, which a core limit of 0 does not.
    """
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
