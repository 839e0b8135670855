"""Launcher of a command in namespaces from which the host cannot be changed or reached, for attacks on a sandbox.

    python tests/envs/throwaway.py COMMAND ...

All mounts are read-only except a new /tmp, the network is loopback, and there are no processes of the host and no
capabilities. Raises OSError if this machine forbids namespaces.
"""

import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from envs import kernel

USER = 1000
"""User of the command inside; outside it is the caller."""
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_QUIET = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
_ALL = (
    kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
)  # fmt: skip


def enter_throwaway() -> None:
    """Enter the namespaces; the next fork is process 1."""
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(_ALL)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{USER} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{USER} {group} 1")


def arrange_throwaway() -> None:
    """Arrange mounts and network, in process 1."""
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    attributes = struct.pack("=QQQQ", _READ_ONLY, 0, 0, 0)
    kernel.system_call("mount_setattr", _SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))
    kernel.mount("tmpfs", "/tmp", "tmpfs", _QUIET & ~kernel.MS_NOEXEC, "size=512m,mode=1777")
    kernel.mount("proc", "/proc", "proc", _QUIET)
    for path in filter(os.path.exists, ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")):
        kernel.mount(path, path, flags=kernel.MS_BIND)
        kernel.mount("none", path, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _QUIET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def main() -> int:
    enter_throwaway()
    init = os.fork()
    if init:
        return os.waitstatus_to_exitcode(os.waitpid(init, 0)[1])
    arrange_throwaway()
    kernel.die_with_parent(9)
    command = os.fork()
    if command == 0:
        kernel.drop_capabilities()
        os.execvp(sys.argv[1], sys.argv[1:])
    while True:  # process 1 waits for orphaned processes
        pid, status = os.wait()
        if pid == command:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    sys.exit(main())
