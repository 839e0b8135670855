"""The precision of a CPU is the one that it multiplies faster, and says nothing of a GPU."""

import pytest

from configs import processor
from configs.loading import load_run_config

INTEL, AMD = "vendor_id\t: GenuineIntel\n", "vendor_id\t: AuthenticAMD\n"


@pytest.mark.parametrize(
    ("info", "fastest"),
    [
        (INTEL + "flags\t\t: avx512f avx512_bf16 amx_bf16 amx_tile\n", "bfloat16"),
        (INTEL + "flags\t\t: avx512f avx512_bf16\n", "float32"),
        (AMD + "flags\t\t: avx2 avx512_bf16\n", "bfloat16"),
        (AMD + "flags\t\t: fma avx2\n", "float32"),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", "float32"),
        (None, "float32"),
    ],
    ids=["Intel with AMX", "Intel without", "AMD with AVX-512", "AMD without", "ARM", "no such file"],
)
def test_precision_is_bfloat16_only_where_the_processor_is_fast_at_it(tmp_path, monkeypatch, info, fastest):
    path = tmp_path / "cpuinfo"
    if info is not None:
        path.write_text(info)
    monkeypatch.setattr(processor, "CPU_INFO", path)
    assert processor.fastest_precision("cpu") == fastest
    assert processor.fastest_precision("cuda") == "bfloat16"


def test_recipe_has_the_last_word(monkeypatch, tmp_path):
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "none")
    config = load_run_config(None, ["learner.dtype=bfloat16"])
    assert (config.learner.precision, config.rollout.engine.precision) == ("bfloat16", "float32")
