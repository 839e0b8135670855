"""The command line: arguments, errors in one line, exit codes, and what each command imports."""

import signal
import subprocess
import sys

import pytest
from ray.exceptions import RayTaskError

from configs.errors import UserError
from configs.loading import DEFAULT_RECIPE, RECIPES, load_run_config, opening_comment
from learner.checkpoint import write_manifest
from ray_jobs.cli import main
from ray_jobs.run.folder import RunFolder
from rollout.engines.engine import BackendError

ROOT = RECIPES.parents[1]
HEAVY = {"torch", "ray", "vllm", "transformers"}


def test_help_and_rejected_commands_import_no_heavy_library(tmp_path):
    """One after the other in one process, those that may import the least first."""
    with RunFolder.open(load_run_config(None, [f"output_dir={tmp_path}", "name=another"])):
        pass
    cases = [
        (["--help"], HEAVY | {"pydantic"}, 0),
        (["train", f"output_dir={tmp_path}", "name=another"], HEAVY, 2),
        (["resume", "nothing"], HEAVY, 2),
        (["view", "nothing"], HEAVY - {"transformers"}, 2),
        (["export", "nothing", "--to", "nowhere"], {"torch", "vllm"}, 2),
        (["train", "envs.mix={lokup=1}"], {"torch", "vllm"}, 2),
        (["evaluate", 'envs.actions=["answer"]', "--adapter", "nothing"], {"torch", "vllm"}, 2),
        (["check", f"output_dir={tmp_path}/none"], {"ray", "vllm"}, 0),
    ]
    code = f"import sys\nfrom ray_jobs.cli import main\nfor words, heavy, _ in {cases!r}:\n"
    code += "    print('\\n>', words, heavy, main(words), heavy & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    endings = [line.rpartition("} ")[2] for line in done.stdout.splitlines() if line.startswith("> ")]
    assert endings == [f"{code} set()" for *_, code in cases], done.stdout + done.stderr


def test_printed_configuration_is_a_recipe_that_prints_the_same(tmp_path, capsys):
    """The recipe, settings and options come in any order."""
    assert main(["check", "seed=3", "sync_cpu", "--print", "learner.learning_rate=2e-6", f"output_dir={tmp_path}"]) == 0
    first = capsys.readouterr().out
    assert first.startswith('name = "sync"\n')
    assert "seed = 3\n" in first
    assert "learning_rate = 2e-06\n" in first
    (tmp_path / "again.toml").write_text(first)
    assert main(["check", str(tmp_path / "again.toml"), "--print"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian"], "train"),
        (["train", "sync_cpu", "seed=3", "demo_cpu"], "demo_cpu"),
        (["compare"], "parameter A"),
        (["evaluate", "--seeds", "x"], "--seeds"),
        (["train", "learner.lerning_rate=1"], "did you mean 'learner.learning_rate'?"),
        (["train", "rollout.group_size=1"], "rollout.group_size"),
        (["train", "model.path=/does/not/exist"], "model.path"),
        (["train", RECIPES / "dapo_qwen3_8b_a40.toml"], "CUDA"),
        (["train", "envs.search=tavily"], "TAVILY_API_KEY"),
    ],
)
def test_user_error_is_one_line_and_exit_code_2(arguments, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)
    monkeypatch.setattr("ray_jobs.run.preflight.card_driver", lambda: None)
    assert main([*map(str, arguments)]) == 2
    output = capsys.readouterr()
    [line] = output.err.splitlines()
    assert line.startswith("agentflow: error: ")
    assert named in line
    assert output.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def trained(monkeypatch):
    """The calls of `run_training`: the configuration, and whether with a PRM."""
    calls = []
    monkeypatch.setattr("ray_jobs.run.preflight.check_before_start", lambda config, **_: None)
    monkeypatch.setattr("ray_jobs.train.run_training", lambda config, _, *, with_prm: calls.append((config, with_prm)))
    return calls


def test_unfinished_run_continues_as_it_started(trained, tmp_path, capsys):
    arguments = [f"output_dir={tmp_path}", "name=r"]
    with RunFolder.open(load_run_config(DEFAULT_RECIPE, arguments), with_prm=True) as folder:
        pass
    assert main(["train", *arguments]) == main(["resume", str(tmp_path / "r")]) == 0
    assert [with_prm for _, with_prm in trained] == [True, True]
    assert capsys.readouterr().out == opening_comment(DEFAULT_RECIPE) + "\n"
    (folder.path / "provenance.json").unlink()
    assert main(["resume", str(tmp_path / "r")]) == 2
    assert str(tmp_path / "r") in capsys.readouterr().err


def test_adapter_is_a_run_a_checkpoint_its_file_or_none(tmp_path, monkeypatch, capsys):
    adapters = []
    monkeypatch.setattr("ray_jobs.run.preflight.check_before_acting", lambda config, draws_tasks: None)
    monkeypatch.setattr("ray_jobs.prm.run_train_prm", lambda config, adapter: adapters.append(adapter))
    run, prm = tmp_path / "run", tmp_path / "run" / "prm"
    prm.mkdir(parents=True)
    write_manifest(prm, kind="prm", renderer="0")
    for version in (5, 10):
        checkpoint = run / "checkpoints" / f"v{version:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "adapter.safetensors").touch()
        write_manifest(checkpoint, policy_version=version, step=version)
    for wrong in (run, prm, tmp_path / "nowhere"):
        assert main(["train-prm", "--adapter", str(wrong)]) == 2
        assert str(wrong) in capsys.readouterr().err
    (run / "config.json").touch()
    for text in (run, checkpoint, checkpoint / "adapter.safetensors", "none"):
        assert main(["train-prm", "--adapter", str(text)]) == 0
    assert adapters == [checkpoint, checkpoint, checkpoint, None]
    (checkpoint / "adapter.safetensors").write_text("changed")
    assert main(["train-prm", "--adapter", str(run)]) == 0
    assert adapters[-1].name == "v000005"


def failing_with(error, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr("ray_jobs.run.doctor.run_doctor", fail)
    return main(["doctor"])


@pytest.mark.parametrize("error", [UserError, BackendError])
def test_user_error_of_an_actor_is_one_line(error, monkeypatch, capsys):
    raised = error("cannot write it;\n  free space")
    # As Ray wraps an error that an actor raises.
    crossed = RayTaskError.from_bytes(RayTaskError("step", "Traceback ...", raised).to_bytes())
    for arrived in (raised, crossed, crossed.as_instanceof_cause()):
        assert failing_with(arrived, monkeypatch) == 2
        assert capsys.readouterr().err == "agentflow: error: cannot write it; free space\n"


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), RuntimeError("a fault"), FileNotFoundError(2, "No such file", "surprise")]
)
def test_bug_keeps_its_traceback(error, monkeypatch):
    with pytest.raises(type(error)):
        failing_with(error, monkeypatch)


def test_sigterm_ends_with_143_and_its_handler_is_restored(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("ray_jobs.run.doctor.run_doctor", lambda: signal.raise_signal(signal.SIGTERM))
    assert main(["doctor"]) == 143
    assert capsys.readouterr().err == "agentflow: ended by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is before
