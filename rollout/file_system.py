"""The file system that a folder is on, and whether several machines share it."""

from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")

_NETWORK = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "pvfs2",
        "smb3",
        "smbfs",
        "virtiofs",
    }
)
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.ntfs-3g", "fuse.exfat"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """`kind` as the kernel names it, such as ext4 or nfs4; empty where the kernel does not say."""

    kind: str
    mount: Path

    @property
    def networked(self) -> bool:
        """Other machines may have it mounted, too: memory that is mapped from its files is not shared with them. A file
        system in user space counts, but for the few that are known to be local."""
        return self.kind in _NETWORK or (self.kind.startswith("fuse.") and self.kind not in _LOCAL_FUSE)


def file_system_of(path: Path, mounts: Path | None = None) -> FileSystem:
    """Where a path is, or will be once it is made. `mounts`: lines as of /proc/self/mountinfo, by default this
    process's own."""
    try:
        lines = (mounts or MOUNTS).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    whole, found = path.resolve(), FileSystem(kind="", mount=Path("/"))
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = Path(_unescaped(before.split(" ")[4]))
        # The later of two mounts on one folder hides the one before.
        if whole.is_relative_to(mount) and len(mount.parts) >= len(found.mount.parts):
            found = FileSystem(kind=after.split(" ")[0], mount=mount)
    return found


def _unescaped(field: str) -> str:
    r"""The kernel writes a space as \040, and tab, line end and backslash in the same way."""
    for code in ("\\040", "\\011", "\\012", "\\134"):
        field = field.replace(code, chr(int(code[1:], 8)))
    return field
