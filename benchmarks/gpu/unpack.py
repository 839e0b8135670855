"""Unpacks a piece of `gpu_pack` into a folder for PYTHONPATH: `python3 PIECE/unpack.py SITE`. Needs Python alone."""

import hashlib
import json
import lzma
import shutil
import stat
import sys
import tarfile
import zipfile
from pathlib import Path


def unpack(piece: Path, site: Path) -> None:
    """Put every file of the piece where its manifest says. Raises SystemExit for one that did not come whole."""
    site.mkdir(parents=True, exist_ok=True)
    for entry in json.loads((piece / "manifest.json").read_text())["files"]:
        path = piece / entry["file"]
        if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            raise SystemExit(f"{path} is not what was packed; send {piece.name} again")
        KINDS[entry["kind"]](path, site, entry["target"])


def _squeezed(path: Path, site: Path, target: str) -> None:
    (site / target).parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path) as source, (site / target).open("wb") as into:
        shutil.copyfileobj(source, into)


def _tar(path: Path, site: Path, target: str) -> None:
    with tarfile.open(path) as tar:
        tar.extractall(site, filter="data")


def _wheel(path: Path, site: Path, target: str) -> None:
    """With the programs among its files as programs, which `zipfile` leaves to others."""
    with zipfile.ZipFile(path) as wheel:
        for member in wheel.infolist():
            if ".data/" not in member.filename:
                place = Path(wheel.extract(member, site))
                if member.external_attr >> 16 & stat.S_IXUSR and place.is_file():
                    place.chmod(0o755)


def _half(path: Path, site: Path, target: str) -> None:
    """The second one to come joins them."""
    shutil.copy(path, site)
    halves = [site / f"{target}.{number}" for number in (1, 2)]
    if all(half.exists() for half in halves):
        whole = site / target
        whole.write_bytes(b"".join(half.read_bytes() for half in halves))
        _wheel(whole, site, "")
        for one in (whole, *halves):
            one.unlink()


KINDS = {"xz": _squeezed, "tar": _tar, "wheel": _wheel, "half": _half}

if __name__ == "__main__":
    unpack(Path(__file__).parent, Path(sys.argv[1]))
