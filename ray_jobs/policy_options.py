"""The options that many commands share: a recipe with its overrides, an adapter, a back end."""

import argparse
from pathlib import Path

DEFAULT_RECIPE = Path(__file__).parents[1] / "configs" / "recipes" / "demo_cpu.toml"


def add_recipe(parser: argparse.ArgumentParser, *, positional: bool) -> None:
    if positional:
        parser.add_argument("recipe", nargs="?", type=Path, default=DEFAULT_RECIPE, help="TOML recipe")
    else:
        parser.add_argument("--recipe", type=Path, default=DEFAULT_RECIPE, help="TOML recipe")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="e.g. learner.learning_rate=2e-6")


def add_adapter(parser: argparse.ArgumentParser) -> None:
    says = "checkpoint folder of a run, or the adapter file in it; `none` (default) is the untouched base model"
    parser.add_argument("--adapter", type=_adapter, metavar="CHECKPOINT", help=says)


def add_backend(parser: argparse.ArgumentParser) -> None:
    says = "vllm:FOLDER (a merged model), ollama:MODEL or openai:MODEL; backend.base_url=... says where it listens"
    parser.add_argument("--backend", metavar="KIND:MODEL", help=says)


def _adapter(text: str) -> Path | None:
    if text == "none":
        return None
    path = Path(text).expanduser()
    return path.parent if path.is_file() else path
