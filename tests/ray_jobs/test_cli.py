import ast
import importlib
import json
import shlex
import signal
import subprocess
import sys

import pytest
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayTaskError

from configs.errors import UserError
from configs.loading import RECIPES, load_run_config
from learner.checkpoint import write_manifest
from ray_jobs.cli import main, make_app
from ray_jobs.commands.given import DEFAULT_RECIPE, sorted_out
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.preflight import Ready
from ray_jobs.run.summary import next_commands

ROOT = RECIPES.parents[1]


def agentflow(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "ray_jobs.cli", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"torch", "ray", "vllm", "transformers", "pydantic"}),
        (["train", "--dry-run", "output_dir=/tmp/agentflow-no-such-folder"], {"torch", "ray", "vllm"}),
        (["train", "envs.mix={lokup=1}"], {"torch", "vllm"}),
        (["view", "nothing"], {"torch", "ray", "vllm"}),
        (["train", "output_dir=/dev/null/runs"], {"torch", "ray", "vllm", "transformers"}),
        (["train", "output_dir={place}", "name=file"], {"torch", "ray", "vllm", "transformers"}),
        (["train", "output_dir={place}", "name=another"], {"torch", "ray", "vllm", "transformers"}),
        (["resume", "nothing"], {"torch", "ray", "vllm", "transformers"}),
        (["export", "nothing", "--to", "nowhere"], {"torch", "vllm", "transformers"}),
        (["serve", "nothing"], {"torch", "vllm"}),
        (["evaluate", 'envs.actions=["answer"]', "--adapter", "nothing"], {"torch", "vllm"}),
    ],
)
def test_help_and_what_is_refused_import_no_heavy_library(arguments, heavy, tmp_path):
    (tmp_path / "file").touch()
    with RunFolder.create(load_run_config(None, [f"output_dir={tmp_path}", "name=another"])):
        pass
    given = [text.replace("{place}", str(tmp_path)) for text in arguments]
    code = f"import sys\nfrom ray_jobs.cli import main\ncode = main({given!r})\nprint(code, {heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    refused = "0" if arguments[-1] == "--help" or "--dry-run" in arguments else "2"
    assert done.stdout.splitlines()[-1:] == [f"{refused} set()"], done.stderr


def test_dry_run_prints_the_resolved_configuration_with_overrides_on_either_side(tmp_path, capsys):
    assert main(["train", "seed=3", "--dry-run", "learner.learning_rate=2e-6", f"output_dir={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "seed = 3\n" in printed
    assert "learning_rate = 2e-06\n" in printed


@pytest.mark.parametrize(
    "arguments",
    [["seed=3", "sync_cpu", "--dry-run"], ["sync_cpu", "--dry-run", "seed=3"], ["--dry-run", "seed=3", "sync_cpu"]],
)
def test_recipe_overrides_and_options_stand_in_any_order(arguments, tmp_path, capsys):
    assert main(["train", *arguments, f"output_dir={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith('name = "sync"\n')
    assert "seed = 3\n" in printed


def test_two_recipes_are_refused(capsys):
    assert main(["train", "sync_cpu", "seed=3", "demo_cpu"]) == 2
    assert "unrecognized arguments: demo_cpu; the recipe is 'sync_cpu'" in capsys.readouterr().err


def test_what_a_dry_run_prints_is_a_recipe_that_prints_the_same(tmp_path, capsys):
    assert main(["train", "--dry-run", "seed=3", f"output_dir={tmp_path}"]) == 0
    first = capsys.readouterr().out
    (tmp_path / "again.toml").write_text(first)
    assert main(["train", str(tmp_path / "again.toml"), "--dry-run"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sede=1"], "unknown key 'sede'"),
        (["seed=abc"], "seed: must be a whole number"),
        (["rollout.group_size=1"], "must be at least 2"),
        (["model.path=/does/not/exist"], "is no model folder"),
        ([RECIPES / "dapo_qwen3_8b_a40.toml"], "no CUDA GPU"),
        (["envs.mix={nonsense=1}"], "unknown data set 'nonsense'"),
        (["envs.search=tavily"], "needs TAVILY_API_KEY"),
        (["no-such-recipe.toml"], "recipe 'no-such-recipe.toml' does not exist; name a file, or one of "),
        (["demo_gpu"], "; did you mean 'demo_cpu'?"),
        (["learner.lerning_rate=1"], "unknown key 'learner.lerning_rate'; did you mean 'learner.learning_rate'?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_before_anything_starts(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)
    monkeypatch.setattr("ray_jobs.checks.machine._num_gpus", lambda: 0)
    assert main(["train", *map(str, arguments), f"output_dir={tmp_path}/runs"]) == 2
    said_by_us = capsys.readouterr()
    lines = said_by_us.err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("agentflow: error: ")
    assert said in lines[0]
    assert said_by_us.out == ""
    assert not (tmp_path / "runs").exists()


def test_bad_input_is_one_line_for_the_whole_process_too(tmp_path):
    (tmp_path / "file").touch()
    done = agentflow("train", DEFAULT_RECIPE, f"output_dir={tmp_path}/file/runs")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "is not writable" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "envs.mix={lokup=1.0}"], "unknown data set 'lokup'; known: "),
        (["train", "envs.mix={lokup=1.0}"], "; did you mean 'lookup'?"),
        (["train", f"envs.data_path={__file__}"], "is read by none of 'lookup'"),
        (["train", "model.path=/does/not/exist"], "is no model folder"),
        (["train", "reward.credit={prm_path='/does/not/exist'}"], "holds no process reward model"),
        (
            ["train", "reward.credit=outcome_gated", "envs.choice=mix", "envs.mix={branch=0.5, game24=0.5}"],
            "label.type = 'plan'",
        ),
    ],
)
def test_a_dry_run_refuses_what_a_start_would_refuse(arguments, said, tmp_path, capsys):
    command, *overrides = arguments
    assert main([command, "--dry-run", f"output_dir={tmp_path}", *overrides]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("name = ")
    [line] = captured.err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "unknown command 'trian'; `agentflow help` lists them; did you mean 'train'?"),
        (["help", "trian"], "did you mean 'train'?"),
        (
            ["train", "--dryrun"],
            "agentflow train --help` says what there is; did you mean '--dry-run'?",
        ),
        (["compare"], "required: A; `agentflow compare --help` says what there is"),
        (["evaluate", "--seeds", "x"], 'invalid value for --seeds: unable to convert "x" into int'),
        (["evaluate", "--limit", "0"], 'invalid value "0" for --limit. Must be >= 1'),
        (["evaluate", "--benchmark", ""], "invalid value for --benchmark: '' names no benchmark"),
        (["evaluate", "--data", "x"], "--data is about the files of benchmarks, and the recipe's held-out tasks have"),
        (["evaluate", "--part"], "none; name some with --benchmark, or leave it out"),
        (["submit", "--phase", "pipeline"], 'for --phase. Choose from: "train"'),
        (["jobs", "logs"], "required: JOB; `agentflow jobs logs --help` says what there is"),
        (["run-code", "x.py", "--timeout", "nan"], 'invalid value "nan" for --timeout'),
    ],
)
def test_a_mistyped_command_line_is_one_line(arguments, said, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith("agentflow: error: ")
    assert said in line
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Usage: agentflow COMMAND"),
        (["help"], "Usage: agentflow COMMAND"),
        (["help", "train"], "Usage: agentflow train "),
        (["help", "jobs", "stop"], "Usage: agentflow jobs stop "),
        (["--version"], "agentflow 0."),
    ],
)
def test_help_and_version_are_there_under_their_usual_names(arguments, said, capsys):
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(said)


def test_run_folder_of_another_run_is_not_overwritten(tmp_path, capsys):
    with RunFolder.create(load_run_config(None, [f"output_dir={tmp_path}", "name=demo"])):
        pass
    assert main(["train", str(DEFAULT_RECIPE), f"output_dir={tmp_path}"]) == 2
    assert f"run folder '{tmp_path}/demo' holds a run with other settings (num_steps, " in capsys.readouterr().err


@pytest.fixture
def trained(monkeypatch):
    """What `agentflow train` would do once all checks have passed: the configuration, and whether with a PRM."""
    seen = []
    monkeypatch.setattr("ray_jobs.run.preflight.check_before_start", lambda config, **_: None)
    monkeypatch.setattr(
        "ray_jobs.train.run_training", lambda config, ready, *, with_prm: seen.append((config, with_prm))
    )
    return seen


@pytest.mark.parametrize(
    ("override", "with_prm"),
    [("reward.credit=outcome_gated", True), ("seed=1", False), ("reward.credit={prm_path='prm'}", False)],
)
def test_training_makes_a_prm_first_where_the_recipe_wants_one_and_names_none(override, with_prm, trained, tmp_path):
    assert main(["train", override, f"output_dir={tmp_path}"]) == 0
    [(config, asked)] = trained
    assert asked == config.trains_prm == with_prm


@pytest.mark.parametrize("with_prm", [True, False])
def test_an_unfinished_run_goes_on_as_it_began(with_prm, trained, tmp_path):
    """Also one of a version whose `train` made no PRM."""
    given = [f"output_dir={tmp_path}", "name=r"]
    with RunFolder.create(load_run_config(DEFAULT_RECIPE, given), with_prm=with_prm):
        pass
    assert main(["train", *given]) == main(["resume", str(tmp_path / "r")]) == 0
    assert [asked for _, asked in trained] == [with_prm, with_prm]


def test_a_run_that_does_not_say_how_it_began_is_refused_in_one_line(trained, tmp_path, capsys):
    given = [f"output_dir={tmp_path}", "name=r"]
    with RunFolder.create(load_run_config(DEFAULT_RECIPE, given)) as folder:
        (folder.path / "provenance.json").write_text("{}")
    assert main(["resume", str(tmp_path / "r")]) != 0
    assert "is not the folder of a run" in capsys.readouterr().err


def test_of_a_finished_run_the_report_is_shown_with_what_to_do_for_a_new_one(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ray_jobs.viewer.report.write_report", lambda path: path / "report.html")
    monkeypatch.setattr("ray_jobs.run.console.print_summary", print)
    given = [f"output_dir={tmp_path}", "name=r"]
    with RunFolder.create(load_run_config(DEFAULT_RECIPE, given)) as folder:
        folder.write_summary({"wall_s": 1})
    assert main(["train", *given]) == 0
    said = capsys.readouterr().out
    assert f"the run in '{tmp_path}/r' has ended" in said
    assert "for a new one: another name=..." in said
    assert f"{tmp_path}/r/report.html" in said
    assert trained == []
    assert main(["train", *given, "seed=5"]) == 2
    assert "holds a run with other settings (seed)" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["evaluate"], ["solve", "What is 2 + 3?"]])
def test_commands_that_only_act_check_the_same_settings(command, capsys):
    assert main([*command, "envs.mix={nonsense=1}"]) == 2
    assert "unknown data set 'nonsense'" in capsys.readouterr().err


def test_unknown_option_is_refused():
    done = agentflow("train", "--nonsense")
    assert done.returncode == 2
    assert "unrecognized arguments: --nonsense" in done.stderr


def test_adapter_is_a_run_a_checkpoint_the_file_in_it_or_none(tmp_path, monkeypatch, capsys):
    adapters = []
    monkeypatch.setattr("ray_jobs.run.preflight.check_before_acting", lambda config, draws_tasks: None)
    monkeypatch.setattr("ray_jobs.evaluate.run_evaluation", lambda config, request: adapters.append(request.adapter))
    run = tmp_path / "run"
    for version in (5, 10):
        checkpoint = run / "checkpoints" / f"v{version:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "adapter.safetensors").touch()
        write_manifest(checkpoint, policy_version=version, step=version)
    assert main(["evaluate", "--adapter", str(run)]) == 2
    assert "neither a run (it has no config.json) nor a checkpoint" in capsys.readouterr().err
    (run / "config.json").touch()
    for text in (run, checkpoint, checkpoint / "adapter.safetensors", "none"):
        assert main(["evaluate", "--adapter", str(text)]) == 0
    assert adapters == [checkpoint, checkpoint, checkpoint, None]
    (checkpoint / "adapter.safetensors").write_text("changed")
    assert main(["evaluate", "--adapter", str(run)]) == 0
    assert adapters[-1].name == "v000005"
    assert main(["evaluate", "--adapter", str(tmp_path / "nowhere")]) == 2
    assert "is no folder; name a run, a checkpoint in it" in capsys.readouterr().err


def test_process_reward_model_is_no_adapter(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ray_jobs.run.preflight.check_before_acting", lambda config, draws_tasks: None)
    monkeypatch.setattr("ray_jobs.evaluate.run_evaluation", lambda config, request: None)
    prm = tmp_path / "run" / "prm"
    prm.mkdir(parents=True)
    write_manifest(prm, kind="prm", renderer="0")
    asked = (["evaluate", "--adapter"], ["solve", "6*7?", "--adapter"], ["export", "--to", str(tmp_path / "out")])
    for command in asked:
        assert main([*command, str(prm)]) == 2
        assert "is no checkpoint of a planner; name a run" in capsys.readouterr().err


def failing_with(error, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr("ray_jobs.checks.doctor.run_doctor", fail)
    return main(["doctor"])


def crossing(error):
    """What Ray makes of an error that an actor raised."""
    return RayTaskError.from_bytes(RayTaskError("step", "Traceback ...", error).to_bytes())


def errors_for_the_user():
    """Those that the source files define, each imported from where it is."""
    bases, homes = {}, {}
    for room in ("configs", "envs", "rollout", "learner", "reward", "actors", "ray_jobs"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
                    homes[node.name] = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    found, known = set(), {"UserError"}
    while known:
        known = {name for name, below in bases.items() if below & known} - found
        found |= known
    return [getattr(importlib.import_module(homes[name]), name) for name in sorted(found)]


def test_every_error_for_the_user_is_one_line_also_where_an_actor_raised_it(monkeypatch, capsys):
    errors = errors_for_the_user()
    assert len(errors) > 30
    for error in errors:
        assert issubclass(error, UserError)
        raised = error("cannot write it;\n  free space")
        crossed = crossing(raised)
        for arrived in (raised, crossed, crossed.as_instanceof_cause()):
            assert failing_with(arrived, monkeypatch) == 2
            assert capsys.readouterr().err == "agentflow: error: cannot write it; free space\n", error


def test_an_error_for_the_user_is_known_by_its_base_and_not_by_its_name(monkeypatch, capsys):
    renamed = type("AnyName", (UserError, ValueError), {})
    assert failing_with(renamed("say this"), monkeypatch) == 2
    assert capsys.readouterr().err == "agentflow: error: say this\n"
    with pytest.raises(RuntimeError, match="a fault"):
        failing_with(type("CheckpointError", (RuntimeError,), {})("a fault"), monkeypatch)


@pytest.mark.parametrize("kind", [OutOfDiskError, ObjectStoreFullError])
def test_a_full_object_store_is_one_line_whichever_part_met_it(kind, monkeypatch, capsys):
    raised = kind("Local disk is full")
    once = crossing(raised).as_instanceof_cause()
    for arrived in (raised, once, crossing(once).as_instanceof_cause()):
        assert failing_with(arrived, monkeypatch) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("agentflow: error: Ray's object store is full")
        assert "`ray memory`" in line
        assert "`agentflow resume`" in line


def test_interrupt_ends_with_130(monkeypatch, capsys):
    assert failing_with(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == "agentflow: interrupted\n"


def test_sigterm_ends_with_143_and_is_left_as_it_was(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("ray_jobs.checks.doctor.run_doctor", lambda: signal.raise_signal(signal.SIGTERM))
    assert main(["doctor"]) == 143
    assert capsys.readouterr().err == "agentflow: ended by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is before


def pressed_ctrl_c(*_):
    raise KeyboardInterrupt


def got_sigterm(*_):
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("cut_off", "code", "what"), [(pressed_ctrl_c, 130, "interrupted"), (got_sigterm, 143, "ended by SIGTERM")]
)
def test_run_that_is_cut_off_names_the_command_that_goes_on(cut_off, code, what, tmp_path, monkeypatch, capsys):
    from ray_jobs.run.run import open_run

    for name in ("start_ray", "stop_ray", "start_parts"):
        monkeypatch.setattr(f"ray_jobs.run.run.{name}", lambda *_: None)
    monkeypatch.setattr("ray_jobs.run.run.RunFolder.keep_tokenizer", lambda *_: None)
    config = load_run_config(None, [f"output_dir={tmp_path}/my runs", "reward.credit=outcome"])

    def interrupted():
        with open_run(config, Ready(model_path=tmp_path, sandbox=None), with_prm=False):
            raise AssertionError("a run that was interrupted while it started has begun")

    monkeypatch.setattr("ray_jobs.run.run.start_parts", cut_off)
    monkeypatch.setattr("ray_jobs.checks.doctor.run_doctor", interrupted)
    assert main(["doctor"]) == code
    said = capsys.readouterr().err
    assert said == f"agentflow: {what}; `agentflow resume '{tmp_path}/my runs/run'` goes on from here\n"


@pytest.mark.parametrize(
    "error", [NotADirectoryError(20, "Not a directory", "a/b"), OSError(28, "No space left", "/x")]
)
def test_a_place_that_cannot_be_used_is_one_line(error, monkeypatch, capsys):
    assert failing_with(error, monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"agentflow: error: cannot use '{error.filename}': {error.strerror}; ")
    assert "Errno" not in said


@pytest.mark.parametrize("error", [ValueError("a bug"), FileNotFoundError(2, "No such file", "surprise")])
def test_surprise_keeps_its_traceback(error, monkeypatch):
    with pytest.raises(type(error)):
        failing_with(error, monkeypatch)


def test_the_command_that_asks_the_trained_planner_can_be_pasted(tmp_path):
    """Whatever the question begins with, and wherever the run lies."""
    run = tmp_path / "lr=1e-6" / "r"
    run.mkdir(parents=True)
    for question in ("-7 + 12 = ?", "What is 'it'?"):
        row = {"phase": "eval_after", "reward": 1.0, "question": question}
        (run / "trajectories.jsonl").write_text(json.dumps(row) + "\n")
        _, (command, _) = next_commands(run)
        _, *words = shlex.split(command)
        asked, bound, _ = make_app().parse_args(words)
        assert asked.__name__ == "solve"
        assert bound.arguments["question"] == question
        assert bound.arguments["recipe"] == str(run / "config.json")
    recipe, changes = sorted_out([str(run / "config.json"), "envs.data_path=a/b=c"])
    assert (recipe, changes) == (run / "config.json", ("envs.data_path=a/b=c",))
