"""What a card is and how fast; whether vLLM's compiled extension loads there."""

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.stage import Found, MissingError, Stage, found

LIBRARIES = ("torch", "triton", "transformers", "peft", "xgrammar", "pydantic", "vllm", "ray", "deepspeed")
EXTENSION = "_C_stable_libtorch.abi3.so"


def facts(stage: Stage) -> Found:
    side, copied = (256, 2**20) if stage.rehearsal else (8192, 2**32)
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=stage.device) for _ in range(2))
    source = torch.empty(copied, dtype=torch.uint8, device=stage.device)
    target = torch.empty_like(source)
    product_s = seconds_of(lambda: torch.mm(left, right), stage.device)
    copy_s = seconds_of(lambda: target.copy_(source), stage.device)
    values = {
        "bf16_tflops": 2 * side**3 / product_s / 1e12,
        "copy_gb_s": 2 * copied / copy_s / 1e9,
        "shm_free_gib": shutil.disk_usage("/dev/shm").free / 2**30,
    }
    return found(values, libraries=_versions(), kernel=platform.release(), python=platform.python_version(), **_card())


def seconds_of(work: Callable[[], Any], device: str, *, repeats: int = 10) -> float:
    """The mean after three tries, of work on the card or the CPU."""
    for _ in range(3):
        work()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - started) / repeats


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def _card() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    about = torch.cuda.get_device_properties(0)
    asked = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,mig.mode.current", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "capability": f"{about.major}.{about.minor}",
        "memory_gib": about.total_memory / 2**30,
        "multiprocessors": about.multi_processor_count,
        "driver": told,
        "cuda": torch.version.cuda,
    }


def extension(stage: Stage) -> Found:
    """vLLM's extension in its stable ABI, and the operators that it brings."""
    spec = importlib.util.find_spec("vllm")
    places = [Path(place) / EXTENSION for place in (spec.submodule_search_locations or ())] if spec else []
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise MissingError(f"no {EXTENSION}: vllm for CUDA is not installed")
    torch.ops.load_library(path)
    return found({"loaded": hasattr(torch.ops._C, "rms_norm")}, path=str(path), torch=torch.__version__)
