"""The precision of a CPU is the one that it multiplies faster, and says nothing of a GPU. A CPU lacks AVX-512 only
where it is known for an x86 without it."""

import pytest

from configs import processor
from configs.loading import load_run_config

INTEL, AMD = "vendor_id\t: GenuineIntel\n", "vendor_id\t: AuthenticAMD\n"


@pytest.mark.parametrize(
    ("info", "fastest", "lacks_avx512"),
    [
        (INTEL + "flags\t\t: avx512f avx512_bf16 amx_bf16 amx_tile\n", "bfloat16", False),
        (INTEL + "flags\t\t: avx512f avx512_bf16\n", "float32", False),
        (AMD + "flags\t\t: avx2 avx512f avx512_bf16\n", "bfloat16", False),
        (AMD + "flags\t\t: fma avx2\n", "float32", True),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", "float32", False),
        (None, "float32", False),
    ],
    ids=["Intel with AMX", "Intel without", "AMD with AVX-512", "AMD without", "ARM", "no such file"],
)
def test_processor_is_read_for_what_it_is_fast_at(tmp_path, monkeypatch, info, fastest, lacks_avx512):
    path = tmp_path / "cpuinfo"
    if info is not None:
        path.write_text(info)
    monkeypatch.setattr(processor, "CPU_INFO", path)
    assert processor.fastest_precision("cpu") == fastest
    assert processor.fastest_precision("cuda") == "bfloat16"
    assert processor.lacks_avx512() == lacks_avx512


def test_recipe_has_the_last_word(monkeypatch, tmp_path):
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "none")
    config = load_run_config(None, ["learner.dtype=bfloat16"])
    assert (config.learner.precision, config.rollout.engine.precision) == ("bfloat16", "float32")
