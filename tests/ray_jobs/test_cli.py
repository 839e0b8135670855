import subprocess
import sys

import pytest

from ray_jobs.cli import main


def agentflow(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "ray_jobs.cli", *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--dry-run"]])
def test_help_and_dry_run_import_no_heavy_library(arguments):
    code = (
        "import sys\nfrom ray_jobs.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)\nsys.exit(len(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_dry_run_prints_the_resolved_configuration_with_overrides_on_either_side(capsys):
    assert main(["train", "seed=3", "--dry-run", "learner.learning_rate=2e-6"]) == 0
    printed = capsys.readouterr().out
    assert "seed = 3\n" in printed
    assert "learning_rate = 2e-06\n" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sede=1"], "unknown key 'sede'"),
        (["seed=abc"], "seed: Input should be a valid integer"),
        (["rollout.group_size=1"], "greater than or equal to 2"),
        (["model.path=/does/not/exist"], "is no model folder"),
        (["configs/recipes/dapo_qwen3_8b_gpu.toml"], "no CUDA GPU"),
        (["envs.mix={nonsense=1}"], "unknown data set 'nonsense'"),
        (["envs.search=tavily"], "needs TAVILY_API_KEY"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_before_anything_starts(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)
    recipe = [] if arguments[0].endswith(".toml") else ["configs/recipes/demo_cpu.toml"]
    assert main(["train", *recipe, *arguments, f"output_dir={tmp_path}/runs"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert not (tmp_path / "runs").exists()


def test_run_folder_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["train", "configs/recipes/demo_cpu.toml", f"output_dir={tmp_path}/file/runs"]) == 2
    assert "is not writable" in capsys.readouterr().err


def test_run_folder_of_another_run_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").touch()
    assert main(["train", "configs/recipes/demo_cpu.toml", f"output_dir={tmp_path}"]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_unknown_option_is_refused():
    done = agentflow("train", "--nonsense")
    assert done.returncode == 2
    assert "unrecognized arguments: --nonsense" in done.stderr
