"""The driver of this machine's cards, and whether CUDA 13 runs on it."""

import shutil
import subprocess

MIN_DRIVER = 580
"""Of CUDA 13, for which torch and vLLM of requirements-gpu.lock are built."""


def card_driver() -> str | None:
    """The driver's version as nvidia-smi tells it; None without the program, or where it finds no card."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = answer.stdout.strip().partition("\n")[0]
    return first if answer.returncode == 0 and first[:1].isdigit() else None


def too_old(driver: str) -> str | None:
    """What to say of a driver that CUDA 13 does not run on; None of one that it does."""
    if int(driver.partition(".")[0]) >= MIN_DRIVER:
        return None
    return f"the card's driver is {driver}, and CUDA 13 needs {MIN_DRIVER} or newer; update the driver"
