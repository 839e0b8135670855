"""What this machine's processor is good at: its faster precision, its vector units."""

from functools import lru_cache
from pathlib import Path
from typing import Literal

Precision = Literal["bfloat16", "float32"]
Dtype = Literal["auto", "bfloat16", "float32"]

CPU_INFO = Path("/proc/cpuinfo")


def precision_of(dtype: Dtype, device: Literal["cpu", "cuda"]) -> Precision:
    """What a recipe's `dtype` means on this machine."""
    return fastest_precision(device) if dtype == "auto" else dtype


def fastest_precision(device: Literal["cpu", "cuda"]) -> Precision:
    """bfloat16 on a GPU, and on a processor that multiplies it in hardware at full speed: Intel's with AMX, AMD's with
    AVX-512. Elsewhere float32: measured at the sizes of the demo's layers, bfloat16 is 1.8 times as slow on an Intel
    with AVX-512 alone, and 5 to 40 times without AVX-512."""
    said = _said(CPU_INFO)
    flags = said.get("flags", "").split()
    fast_amd = "AuthenticAMD" in said.get("vendor_id", "") and "avx512_bf16" in flags
    return "bfloat16" if device == "cuda" or "amx_bf16" in flags or fast_amd else "float32"


def lacks_avx512() -> bool:
    """True for an x86 processor without AVX-512; False for any other, and where nothing is known of it."""
    flags = _said(CPU_INFO).get("flags", "").split()
    return bool(flags) and "avx512f" not in flags


@lru_cache
def _said(info: Path) -> dict[str, str]:
    """What the machine says of its processor, by name; empty where it says nothing."""
    try:
        lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    except OSError:
        return {}
    return {name.strip(): value for name, value in lines.items()}
