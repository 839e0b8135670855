"""A base's weights as vLLM holds them and as transformers names them: one memory, two layouts.

vLLM joins queries, keys and values, and gate and up, along their outputs. A slice of rows is contiguous, so each part
is a view of what was joined, and a model may be built on such views without a copy.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch
from torch import Tensor

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Of the Llama, Qwen2 and Qwen3 families."""
WHOLE = {part: whole for whole, parts in JOINED.items() for part in parts}

Rows = Mapping[str, tuple[int, ...]]
"""By a joined weight's name: the rows of each of its parts, in order."""


def join(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights and biases by vLLM's names, from those by transformers' names `[outputs, inputs]`. What is not joined is
    passed on as it is. Raises KeyError where a part is missing."""
    joined: dict[str, Tensor] = {}
    for name, weight in weights.items():
        whole, parts = _names(name)
        if whole == name:
            joined[name] = weight
        elif whole not in joined:
            joined[whole] = torch.cat([weights[part] for part in parts])
    return joined


def rows_of(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """What `separate` needs to know of the weights that were joined."""
    found = (_names(name) for name in weights)
    return {whole: tuple(len(weights[part]) for part in parts) for whole, parts in found if parts}


def separate(joined: Mapping[str, Tensor], rows: Rows) -> dict[str, Tensor]:
    """Views by transformers' names of what was joined; nothing is copied."""
    weights: dict[str, Tensor] = {}
    for name, weight in joined.items():
        if name not in rows:
            weights[name] = weight
            continue
        whole = name.split(".")[-2]
        borders = pairwise(accumulate(rows[name], initial=0))
        for part, (begin, end) in zip(JOINED[whole], borders, strict=True):
            weights[name.replace(f".{whole}.", f".{part}.")] = weight[begin:end]
    return weights


def _names(name: str) -> tuple[str, tuple[str, ...]]:
    """Of the joined weight that a weight goes into, and of all its parts; its own and none where it is not joined."""
    part = name.split(".")[-2] if "." in name else ""
    if part not in WHOLE:
        return name, ()
    whole = WHOLE[part]
    parts = tuple(name.replace(f".{part}.", f".{one}.") for one in JOINED[whole])
    return name.replace(f".{part}.", f".{whole}."), parts
