"""Questions as vectors, by a small model that comes with the `wordllama` package: no download, no GPU, microseconds."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIMENSIONS = 256
_WEIGHTS = "weights/l2_supercat_256.safetensors"
_TOKENIZER = "tokenizers/l2_supercat_tokenizer_config.json"
_MAX_CHARS = 8000


class WordEmbedder:
    """The mean of trained token vectors, scaled to length 1. Raises FileNotFoundError without the package's files.

    They are read directly: the package's own loader looks for its tokenizer in another folder than it ships it in,
    and would download it.
    """

    def __init__(self) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        folder = _package_folder()
        self._tokenizer: Any = Tokenizer.from_file(str(folder / _TOKENIZER))
        self._vectors = load_file(str(folder / _WEIGHTS))["embedding.weight"].astype(np.float32)

    def embed(self, text: str) -> NDArray[np.float32]:
        """A unit vector of DIMENSIONS numbers; zeros for a text without a single token."""
        clean = text[:_MAX_CHARS].encode(errors="replace").decode()
        token_ids = self._tokenizer.encode(clean, add_special_tokens=False).ids
        if not token_ids:
            return np.zeros(DIMENSIONS, dtype=np.float32)
        mean = self._vectors[token_ids].mean(axis=0)
        return np.asarray(mean / max(float(np.linalg.norm(mean)), 1e-12), dtype=np.float32)


@cache
def shared_embedder() -> WordEmbedder:
    """One per process: 33 MB."""
    return WordEmbedder()


def _package_folder() -> Path:
    # Found without being imported, which would set up logging for the whole process.
    spec = importlib.util.find_spec("wordllama")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package `wordllama`, whose vectors the memory needs, is not installed")
    return Path(spec.origin).parent
