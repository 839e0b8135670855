"""Places of the sandbox: a jail of namespaces with a read-only root, and private scratch folders."""

import contextlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping

from envs import kernel

UNPRIVILEGED_ID = 65534
PACKAGES_DIR = "/python/site"
TMP_DIR = "/tmp"
TMP_MB, MAX_FILES = 16, 256
"""Limits of all files of an episode together."""
INSTALLED = ("site-packages", "dist-packages")
_STAGE = "/tmp"


def enter_jail(packages: Mapping[str, str]) -> None:
    """Enter the jail with these packages, by their names under PACKAGES_DIR; the next fork is its process 1.

    Root binds the interpreter before it changes to an unprivileged user, which may have no access to its folder (/root
    is 0700). Another user needs the user namespace first, for the right to mount.
    """
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)  # gone after the pivot
    if os.geteuid() == 0 and _may_unshare_mounts():
        _enter_private_root(packages)
        os.setgroups([])
        os.setresgid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
        os.setresuid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
        kernel.set_dumpable(True)
        _enter_user_namespace(proc)
    else:
        _enter_user_namespace(proc)
        _enter_private_root(packages)
    os.close(proc)
    kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)
    socket.sethostname("sandbox")


def enter_cell() -> None:
    """Enter the part of one episode, with separate pids, IPC and /tmp; the next fork is its process 1."""
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET)
    _mount_tmpfs(TMP_DIR, f"size={TMP_MB}m,nr_inodes={MAX_FILES},mode=0700", kernel.MS_NOEXEC)


def python_directories() -> list[str]:
    """Return the directories of the standard library, without those of installed packages."""
    return [path for path in sys.path if os.path.isfile(f"{path}/os.py") or path.endswith("/lib-dynload")]


def _may_unshare_mounts() -> bool:
    # Root in a container may lack the right, which any user has in a user namespace.
    with contextlib.suppress(PermissionError):
        kernel.unshare(kernel.CLONE_NEWNS)
        return True
    return False


def _enter_user_namespace(proc: int) -> None:
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{UNPRIVILEGED_ID} {user} 1"),
        ("gid_map", f"{UNPRIVILEGED_ID} {group} 1"),
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
    # Opened before the stage covers /tmp, which may contain a source.
    sources = {target: os.open(source, os.O_PATH) for target, source in sorted(binds.items())}
    _mount_tmpfs(_STAGE, "size=1m,nr_inodes=256,mode=0755")
    for target, source in sources.items():
        _bind_read_only(source, _STAGE + target)
        os.close(source)
    for installed in (f"{_STAGE}{path}/{name}" for path in standard for name in INSTALLED):
        if os.path.isdir(installed):
            _mount_tmpfs(installed, "size=4k,nr_inodes=1,mode=0555", kernel.MS_RDONLY)
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
    # A user namespace may not clear a flag of an inherited mount, so all flags are repeated.
    inherited = os.statvfs(target).f_flag
    kept = inherited & (os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME)
    kept |= kernel.MS_RELATIME if inherited & os.ST_RELATIME else 0
    kernel.mount("none", target, flags=_quiet(kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kept))


def _mount_tmpfs(target: str, options: str, flags: int = 0) -> None:
    kernel.mount("tmpfs", target, "tmpfs", _quiet(flags), options)


def _quiet(flags: int) -> int:
    return flags | kernel.MS_NOSUID | kernel.MS_NODEV


def make_scratch(parent: str) -> str:
    """Make a folder that only this user may enter, for all episodes of one sandbox."""
    return tempfile.mkdtemp(prefix="agentflow-sandbox-", dir=parent)


def make_folder(scratch: str) -> str:
    """Make a folder for one episode, with a name that other episodes cannot guess."""
    path = os.path.join(scratch, secrets.token_hex(8))
    os.mkdir(path, 0o700)
    return path


def remove_folder(path: str | None) -> None:
    """Remove a folder, if there is one, and its content; retry while a dying process may still add files."""
    deadline = time.monotonic() + 5
    while path is not None and os.path.isdir(path) and time.monotonic() < deadline:
        shutil.rmtree(path, ignore_errors=True)
