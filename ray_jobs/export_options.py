"""The options of `agentflow export`."""

import argparse
from pathlib import Path

FORMATS = ("hf", "gguf")
QUANTIZATIONS = ("bf16", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def add_export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|CHECKPOINT", help="a run's newest checkpoint, a checkpoint, or `none`")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a folder that is not there yet")
    parser.add_argument("--format", type=_formats, default=FORMATS, metavar="hf,gguf", help="what to write (both)")
    parser.add_argument("--quantize", choices=QUANTIZATIONS, default="q8_0", help="of the GGUF file (default q8_0)")
    parser.add_argument(
        "--prompts", type=int, default=8, metavar="N", help="planner prompts that measure the quantisation (8; 0: none)"
    )
    parser.add_argument("--recipe", type=Path, help="settings of a checkpoint that lies in no run folder")


def _formats(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if not names or set(names) - set(FORMATS):
        raise argparse.ArgumentTypeError(f"'{text}' is none of hf, gguf and hf,gguf")
    return names
