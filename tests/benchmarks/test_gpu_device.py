"""The steps for a card, rehearsed on the CPU, and the pieces in which they travel."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu_device, gpu_pack
from benchmarks.gpu import unpack as unpacking
from benchmarks.gpu.expected import CARDS, Expected, card_of, decode_step_s, expectations, learner_tokens_per_s
from benchmarks.gpu.run import run_config
from benchmarks.gpu.stage import Stage, found
from ray_jobs.plan.plan import make_plan
from tests.changed import replace

ROOT = Path(__file__).parents[2]


def rehearse(out, *steps, limit=None):
    command = [sys.executable, "-m", "benchmarks.gpu_device", "--out", str(out), "--rehearsal"]
    command += ["--steps", ",".join(steps), *(["--limit", str(limit)] if limit else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    records = {name: json.loads((out / f"{name}.json").read_text()) for name in steps}
    logs = "".join((out / f"{name}.log").read_text()[-2000:] for name in steps)
    return done, records, logs


def rehearse_here(out, *steps):
    """In this process, which has imported most of it; that each runs apart is seen with the others."""
    for name in steps:
        gpu_device.run_here(name, Stage(out=out, rehearsal=True))
    records = {name: json.loads((out / f"{name}.json").read_text()) for name in steps}
    assert not [record for record in records.values() if "checks" not in record]
    return records


def verdicts(record):
    return {row["name"]: row["passed"] for row in record["checks"]}


def test_facts_and_shared_memory_are_rehearsed(tmp_path):
    done, records, logs = rehearse(tmp_path, "facts", "ipc", "extension")
    assert done.returncode == 0, logs
    assert records["facts"]["rehearsed"]
    assert verdicts(records["facts"]) == {"bf16_tflops": None, "copy_gb_s": None, "shm_free_gib": None}
    found = verdicts(records["ipc"])
    assert all(found[name] for name in ("bytes_equal", "one_memory", "holder_outlives_mapper", "mapped_again"))
    assert "vllm for CUDA is not installed" in records["extension"]["skipped"]
    assert "ipc (rehearsal)" in done.stdout
    assert "extension (rehearsal): SKIPPED" in done.stdout


@pytest.mark.slow
def test_attention_and_train_steps_are_rehearsed(tmp_path):
    records = rehearse_here(tmp_path, "attention", "learner")
    assert verdicts(records["attention"]) | {"fused_error": True, "blocks_error": True} == verdicts(
        records["attention"]
    )
    assert {row["kind"] for row in records["attention"]["told"]["rows"]} == {"path", "tree"}
    assert verdicts(records["learner"])["weights_moved"]
    assert len(records["learner"]["told"]["steps"]) == 3


@pytest.mark.slow
def test_the_engines_steps_are_rehearsed(tmp_path):
    records = rehearse_here(tmp_path, "engine", "decoding")
    assert all(verdicts(records["engine"]).values())
    told = records["decoding"]["told"]
    assert told["calm"]["num_tokens"] == 4 * 48
    assert len(told["disturbed"]["stall_s"]) == 6


@pytest.mark.slow
def test_engine_and_learner_beside_each_other_are_rehearsed(tmp_path):
    done, records, logs = rehearse(tmp_path, "together")
    assert done.returncode == 0, logs
    assert verdicts(records["together"])["own_version_is_nearest"]
    assert records["together"]["told"]["trained_tokens_per_s"]["beside"] > 0


@pytest.mark.slow
@pytest.mark.ray
def test_a_whole_run_is_rehearsed(tmp_path):
    done, records, logs = rehearse(tmp_path, "run")
    assert done.returncode == 0, logs
    assert verdicts(records["run"]) | {"no_step_skipped": True, "all_versions_proven": True} == verdicts(records["run"])
    assert records["run"]["told"]["facts"]["num_steps"] == 1


def test_a_step_that_takes_too_long_is_ended_and_the_others_go_on(tmp_path):
    done, records, _ = rehearse(tmp_path, "facts", "ipc", limit=0.2)
    assert done.returncode == 1
    assert [records[name]["failed"] for name in ("facts", "ipc")] == [
        f"ran past its 0.2 s; see {name}.log" for name in ("facts", "ipc")
    ]


def test_without_a_card_every_step_is_skipped_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_device, "_card_name", lambda torch: "")
    gpu_device.run_here("facts", gpu_device.Stage(out=tmp_path, rehearsal=False))
    assert "this machine has no card" in json.loads((tmp_path / "facts.json").read_text())["skipped"]


def left(out, **record):
    (out / "facts.json").write_text(json.dumps({"step": "facts", "rehearsed": True, **record}))


def test_what_is_there_is_not_run_again(tmp_path, capsys):
    left(tmp_path, seconds=1.5, checks=[])
    assert gpu_device.main(["--out", str(tmp_path), "--steps", "facts", "--rehearsal"]) == 0
    assert "facts (rehearsal): 1.5 s" in capsys.readouterr().out


def test_what_was_skipped_is_run_again_once_what_it_lacked_may_be_there(tmp_path, monkeypatch):
    left(tmp_path, skipped="ray cannot be imported")
    monkeypatch.setattr(gpu_device, "run_apart", lambda name, *_: {"step": name, "rehearsed": True, "seconds": 2.0})
    assert gpu_device.main(["--out", str(tmp_path), "--steps", "facts", "--rehearsal"]) == 0
    assert gpu_device._done(tmp_path / "facts.json") is None


def test_a_whole_run_on_a_card_shares_it_and_the_base_and_fits_an_a40(tmp_path):
    config = run_config(Stage(out=ROOT, rehearsal=False))
    assert config.shares_card
    assert config.shares_base
    assert not config.trains_prm
    demo = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    demo |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True}
    demo |= {"max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(demo))
    plan, refusals = make_plan(config, card="A40", model_config=tmp_path / "config.json")
    assert not refusals
    assert sum(process.num_bytes for process in plan.processes) < 10 * 2**30


def test_expected_numbers_of_an_a40_by_hand():
    """15.1 GB of weights and 8 sequences of 2,000 tokens of 147,456 bytes at 0.87 x 696 GB/s, and 8 ms; 4,096 tokens of
    1.9e14 operations at 0.65 x 149.7 TFLOP/s, 6.61 times an H100's 0.09 s of attention, and 4.81 times its 0.27 s of
    elementwise work."""
    a40 = card_of("NVIDIA A40")
    assert decode_step_s(a40, 8, 2000, ahead=False) == pytest.approx(0.0249 + 0.0039 + 0.008, abs=2e-4)
    assert learner_tokens_per_s(a40) == pytest.approx(4096 / (1.953 + 0.595 + 1.300), rel=1e-3)
    assert card_of("NVIDIA H200").gb_s == 4800


def test_a_measured_value_is_judged_by_its_bounds():
    rows = gpu_device.judged(
        "learner", found({"peak_gib": 22.0}, planned={"learner": 20.0}), card="A40", rehearsal=False
    )
    verdict = {row["name"]: row["passed"] for row in rows}
    assert verdict["peak_gib"]
    assert verdict["loss_is_finite"] is False  # nobody measured it
    assert not Expected(value=20.0, most=22.0).passes(22.1)
    assert not Expected(value=True).passes(1.0)
    assert set(gpu_device.STEPS) == {step for step in gpu_device.STEPS if expectations(step, CARDS[0], {})}


PROGRAM = "ray/core/gcs_server"


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as opened:
        for place, text in files.items():
            member = zipfile.ZipInfo(place)
            member.external_attr = (0o100755 if place == PROGRAM else 0o100644) << 16
            opened.writestr(member, text)


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Of vLLM, of one package that it needs and of Ray, as the lock pins them."""
    lock = tmp_path / "gpu.lock"
    lock.write_text("vllm==1.0\n    # via us\nray[default]==3.0\nx-grammar==2.0 ; python_version > '3'\n")
    monkeypatch.setattr(gpu_pack, "PINS", (lock,))
    monkeypatch.setattr(gpu_pack, "NEEDED", ("x-grammar",))
    monkeypatch.setitem(gpu_pack.PIECES, "p2", replace(gpu_pack.PIECES["p2"], packages=("vllm", "x-grammar")))
    with_half = gpu_pack.Piece(packages=("ray", "x-grammar"), make=gpu_pack.packed_half("ray", 2, "x-grammar"))
    monkeypatch.setitem(gpu_pack.PIECES, "p4", with_half)
    folder = tmp_path / "wheels"
    folder.mkdir()
    libraries = {gpu_pack.EXTENSION: "extension" * 1000, gpu_pack.ATTENTION: "attention" * 1000}
    others = {"vllm/engine.py": "code", "vllm/_moe_C.abi3.so": "not needed"}
    wheel(folder / "vllm-1.0-cp38-abi3-any.whl", libraries | others)
    wheel(folder / "x_grammar-2.0-py3-none-any.whl", {"xgrammar/__init__.py": "one"})
    wheel(folder / "ray-3.0-cp312-cp312-any.whl", {"ray/__init__.py": "two", PROGRAM: "#!/bin/sh"})
    return folder


def unpack(piece, site):
    return subprocess.run([sys.executable, str(piece / "unpack.py"), str(site)], capture_output=True, text=True)


def test_pieces_unpack_to_what_was_packed(wheels, tmp_path):
    out, site = tmp_path / "pieces", tmp_path / "site"
    for name in ("p1", "p2", "p3", "p4"):
        gpu_pack.pack(name, wheels, out)
        assert unpack(out / name, site).returncode == 0
        assert (site / "ray").exists() == (name == "p4")
    assert (site / gpu_pack.EXTENSION).read_text() == "extension" * 1000
    assert (site / gpu_pack.ATTENTION).read_text() == "attention" * 1000
    assert (site / "vllm/engine.py").read_text() == "code"
    assert (site / "xgrammar/__init__.py").read_text() == "one"
    assert (site / "ray/__init__.py").read_text() == "two"
    assert os.access(site / PROGRAM, os.X_OK)
    assert not os.access(site / "ray/__init__.py", os.X_OK)
    assert not list(site.rglob("_moe_C*"))
    assert not list(site.glob("*.whl*"))


def test_pieces_that_have_come_are_unpacked_once(wheels, tmp_path, monkeypatch):
    pieces, seen = tmp_path / "pieces", []

    def noted(piece, into):
        seen.append(piece.name)
        unpacking.unpack(piece, into)

    monkeypatch.setattr(gpu_device, "unpack", noted)
    gpu_pack.pack("p1", wheels, pieces)
    site = gpu_device.unpacked(pieces)
    gpu_pack.pack("p3", wheels, pieces)
    gpu_pack.pack("p4", wheels, pieces)
    assert gpu_device.unpacked(pieces) == site
    assert seen == ["p1", "p3", "p4"]
    assert (site / "ray/__init__.py").read_text() == "two"
    assert (site / "xgrammar/__init__.py").read_text() == "one"


def test_a_piece_that_did_not_come_whole_is_refused(wheels, tmp_path):
    gpu_pack.pack("p1", wheels, tmp_path)
    with (tmp_path / "p1" / "_C_stable_libtorch.abi3.so.xz").open("ab") as damaged:
        damaged.write(b"more")
    with pytest.raises(SystemExit, match="is not what was packed; send p1 again"):
        unpacking.unpack(tmp_path / "p1", tmp_path / "site")


def test_a_piece_that_is_too_large_is_refused(wheels, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_pack, "LIMIT", 10)
    with pytest.raises(SystemExit, match="at most 10 travel with the repository; split it"):
        gpu_pack.pack("p1", wheels, tmp_path)


def test_pieces_are_no_part_of_the_repository():
    ignored = subprocess.run(["git", "check-ignore", ".gpu/p1/manifest.json"], cwd=ROOT, capture_output=True)
    assert ignored.returncode == 0 or not (ROOT / ".git").exists()
    assert os.fspath(gpu_pack.ROOT) == os.fspath(ROOT)
