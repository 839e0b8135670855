"""Versioned LoRA adapters inside vLLM: the GPU's way, proven here on the CPU build in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import asyncio, json, sys
sys.path[:0] = [{root!r}, {tests!r}]
from test_vllm_engine import adapter_bytes, request
from configs.rollout import EngineConfig
from learner.demo_model import ensure_demo_model
from rollout.building import build_chat
from rollout.vllm_engine import VllmEngine

path = ensure_demo_model()
prompt = build_chat(path).prompt("You are helpful.", "What is 2 + 3?")
config = EngineConfig(adapter_mode="native", max_num_seqs=4)
engine = VllmEngine(path, config, lora_rank=8, lora_scale=2.0, seed=0)

async def play():
    base = await engine.generate(request(prompt))
    await engine.load_adapter(0, adapter_bytes(path, size=0.02))
    first = await engine.generate(request(prompt))
    await engine.load_adapter(1, adapter_bytes(path, size=0.06))
    second = await engine.generate(request(prompt))
    frozen = await engine.generate(request(prompt, use_adapter=False))
    return [(one.policy_version, one.token_ids, one.logprobs) for one in (base, first, second, frozen)]

print("RESULT" + json.dumps(asyncio.run(play())))
engine.close()
"""


def test_each_version_is_an_adapter_of_its_own_and_the_frozen_base_stays_beside_them():
    script = SCRIPT.format(root=str(Path(__file__).parents[2]), tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
    assert line, done.stderr[-3000:]
    base, first, second, frozen = json.loads(line.removeprefix("RESULT"))
    assert [one[0] for one in (base, first, second, frozen)] == [-1, 0, 1, -1]
    assert frozen[1:] == base[1:]
    assert first[2] != base[2]
    assert second[2] != first[2]
