from pathlib import Path

import pytest

from rollout.store.disk import file_system_of

LINES = (
    "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
    "30 22 0:40 / /mnt rw - tmpfs tmpfs rw",
    "31 30 0:41 / /mnt/shared rw,relatime shared:7 master:2 - nfs4 server:/export rw,vers=4.2",
    "32 31 0:42 / /mnt/shared/my\\040runs rw - fuse.sshfs host:/ rw",
    "33 30 0:43 / /mnt/twice rw - ext4 /dev/sdb1 rw",
    "34 30 0:44 / /mnt/twice rw - cifs //server/share rw",
)


@pytest.fixture
def mounts(tmp_path):
    file = tmp_path / "mountinfo"
    file.write_text("\n".join(LINES) + "\n")
    return file


@pytest.mark.parametrize(
    ("path", "kind", "networked"),
    [
        ("/home/me/runs", "ext4", False),
        ("/mnt/sharedother/runs", "tmpfs", False),
        ("/mnt/shared/runs/not/there/yet", "nfs4", True),
        ("/mnt/shared", "nfs4", True),
        ("/mnt/shared/my runs/demo", "fuse.sshfs", True),
        ("/mnt/twice/runs", "cifs", True),
    ],
)
def test_folder_is_on_the_file_system_of_the_nearest_mount(mounts, path, kind, networked):
    found = file_system_of(Path(path), mounts)
    assert (found.kind, found.networked) == (kind, networked)


def test_link_leads_to_where_the_files_are(mounts, tmp_path):
    (tmp_path / "runs").symlink_to("/mnt/shared/runs")
    assert file_system_of(tmp_path / "runs" / "demo", mounts).kind == "nfs4"


def test_system_that_lists_no_mounts_has_no_known_kind(tmp_path):
    found = file_system_of(tmp_path, tmp_path / "missing")
    assert (found.kind, found.networked) == ("", False)


def test_file_system_of_this_machine_is_known():
    assert file_system_of(Path("/proc")).kind == "proc"


@pytest.mark.parametrize(
    ("kind", "options", "found"),
    [
        ("nfs", "rw,vers=3,nolock,proto=tcp,local_lock=all", "nolock"),
        ("nfs4", "rw,vers=4.2,local_lock=none", None),
        ("lustre", "rw,localflock", "localflock"),
        ("ext4", "rw,nolock", None),
    ],
)
def test_mount_whose_locks_no_other_machine_sees_is_known(tmp_path, kind, options, found):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"31 30 0:41 / /mnt/shared rw,relatime shared:7 - {kind} server:/export {options}\n")
    assert file_system_of(Path("/mnt/shared/runs"), mounts).locks_here_only == found
