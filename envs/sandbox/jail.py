"""Where the zygote lives: own namespaces, and a read-only root that holds Python and nothing else."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence

from envs.sandbox import kernel

NOBODY = 65534
PACKAGES_DIR = "/python/site"
TMP_DIR = "/tmp"
INSTALLED = ("site-packages", "dist-packages")
_STAGE = "/tmp"


def enter_jail(packages: Mapping[str, str]) -> None:
    """`packages` maps a name under PACKAGES_DIR to its source. The next fork is process 1 of the jail.

    Order matters. Real root binds the interpreter before it becomes nobody, who may not be able to walk to
    it (/root is 0700). Another user needs the user namespace first, for the right to mount. /proc is gone
    after the pivot, so its descriptor must be open by then.
    """
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    if os.geteuid() == 0 and _own_mounts():
        _enter_private_root(packages)
        _become_nobody()
        _enter_user_namespace(proc)
    else:
        _enter_user_namespace(proc)
        _enter_private_root(packages)
    os.close(proc)
    kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)
    socket.sethostname("sandbox")


def enter_cell(tmp_mb: int, max_files: int) -> None:
    """One episode's part of the jail: its own pids, IPC and /tmp. The next fork is its process 1."""
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET)
    _mount_tmpfs(TMP_DIR, f"size={tmp_mb}m,nr_inodes={max_files},mode=0700", kernel.MS_NOEXEC)


def python_directories() -> list[str]:
    """The standard library, without the directories of installed packages below or beside it."""
    return [path for path in sys.path if os.path.isfile(f"{path}/os.py") or path.endswith("/lib-dynload")]


def _own_mounts() -> bool:
    """Root in a container may lack the right that any user has in a user namespace."""
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
    except PermissionError:
        return False
    return True


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.set_dumpable(True)


def _enter_user_namespace(proc: int) -> None:
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(file, line.encode())
        os.close(file)


def _enter_private_root(packages: Mapping[str, str]) -> None:
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    standard = python_directories()
    if any(path.startswith(f"{TMP_DIR}/") for path in standard):
        raise OSError(f"the interpreter lies under {TMP_DIR}, which the sandbox gives to the code")
    binds = {path: path for path in standard}
    binds |= {f"{PACKAGES_DIR}/{name}": source for name, source in packages.items()}
    # Opened before the stage covers /tmp, where a source may lie.
    sources = {target: os.open(source, os.O_PATH) for target, source in sorted(binds.items())}
    _mount_tmpfs(_STAGE, "size=1m,nr_inodes=256,mode=0755")
    for target, source in sources.items():
        _bind_read_only(source, _STAGE + target)
        os.close(source)
    _cover_installed_packages(standard)
    os.makedirs(_STAGE + TMP_DIR)
    kernel.mount("none", _STAGE, flags=_quiet(kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY))
    os.chdir(_STAGE)
    kernel.pivot_root(".", ".")
    kernel.detach(".")
    os.chdir("/")


def _bind_read_only(source: int, target: str) -> None:
    path = f"/proc/self/fd/{source}"
    os.makedirs(target, exist_ok=True)
    kernel.mount(path, target, flags=kernel.MS_BIND)
    # A user namespace may not clear a flag of the mount that it inherited, so they are all repeated.
    inherited = os.statvfs(target).f_flag
    kept = inherited & (os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME)
    kept |= kernel.MS_RELATIME if inherited & os.ST_RELATIME else 0
    kernel.mount("none", target, flags=_quiet(kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kept))


def _cover_installed_packages(standard: Sequence[str]) -> None:
    for path in standard:
        for name in INSTALLED:
            target = f"{_STAGE}{path}/{name}"
            if os.path.isdir(target):
                _mount_tmpfs(target, "size=4k,nr_inodes=1,mode=0555", kernel.MS_RDONLY)


def _mount_tmpfs(target: str, options: str, flags: int = 0) -> None:
    kernel.mount("tmpfs", target, "tmpfs", _quiet(flags), options)


def _quiet(flags: int) -> int:
    return flags | kernel.MS_NOSUID | kernel.MS_NODEV
