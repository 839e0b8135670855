import json
import os
import re
import shlex
import sys

import pytest

from configs.api_keys import ApiKeyError
from configs.loading import load_run_config
from envs.datasets.own import module_tasks
from envs.datasets.sampler import evaluation_tasks
from envs.sandbox import SandboxRefusedError, SandboxState
from ray_jobs.checks import machine
from ray_jobs.checks.keys import check_judge_key
from ray_jobs.checks.tasks import notes_before_start
from ray_jobs.commands import training
from ray_jobs.run import model_folder
from ray_jobs.run.model_folder import SMALL_FILES, WEIGHTS, resolve_model
from ray_jobs.run.preflight import (
    PreflightError,
    check_before_acting,
    check_before_start,
    check_labelling,
)
from tests.rollout.chat_templates import GEMMA2, MISTRAL_V03, ROLES, tokenizer_of

OWN_AGENT = ("agent.command=cat", "reward.credit=outcome")
NO_COLD_START = "cold_start.num_demonstrations=0"
SHAPE = {
    **{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
}


@pytest.fixture
def model(tmp_path):
    """A folder that looks like a model; preflight never loads one, but its tokenizer."""
    folder = tmp_path / "model"
    tokenizer_of(ROLES["chatml"]).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture(autouse=True)
def sandbox(monkeypatch):
    """Its own tests start it for real; here it only counts who asks."""
    started = []

    class FakeSandbox:
        state = SandboxState(tier="landlock", layers=("landlock",), without="namespaces: forbidden")

        def __init__(self, settings):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            started.append(self)

    monkeypatch.setattr("envs.sandbox.Sandbox", FakeSandbox)
    return started


@pytest.fixture
def config(tmp_path, model):
    def build(*overrides):
        threads = ["rollout.engine.num_threads=1", "learner.num_threads=1"]
        return load_run_config(None, [f"output_dir={tmp_path}/runs", f"model.path={model}", *threads, *overrides])

    return build


def refusal(config):
    with pytest.raises(PreflightError) as caught:
        check_before_start(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_good_configuration_gives_the_model_folder_and_creates_nothing(config, model, sandbox, tmp_path):
    ready = check_before_start(config())
    assert (ready.model_path, ready.sandbox.tier) == (model, "landlock")
    assert not (tmp_path / "runs").exists()
    assert len(sandbox) == 1


def test_relative_model_folder_becomes_absolute(model, monkeypatch):
    monkeypatch.chdir(model.parent)
    assert resolve_model("model") == model


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_folder_without_configuration_or_weights_is_no_model(config, model, missing):
    (model / missing).unlink()
    assert "is no model folder (config.json and *.safetensors are needed)" in refusal(config())


def test_model_that_cannot_be_downloaded_is_one_line(config, monkeypatch):
    def offline(path, **_):
        raise ConnectionError("https://...\nmany\nlines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    said = refusal(config("model.path=some/model"))
    assert "'some/model'" in said
    assert "check the id and the network" in said


def test_a_template_that_would_spoil_prompts_is_refused_before_the_weights_are_downloaded(config, model, monkeypatch):
    asked = []

    def download(path, allow_patterns, **_):
        asked.append(allow_patterns)
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for template in (MISTRAL_V03, GEMMA2):
        tokenizer_of(template).save_pretrained(model)
        check_before_start(config("model.path=some/model"))
    assert asked == [SMALL_FILES, [*SMALL_FILES, WEIGHTS]] * 2
    (model / "chat_template.jinja").unlink()
    assert "cannot hold the planner's dialogue: it has no chat template; name an instruction-tuned model" in refusal(
        config("model.path=some/model")
    )
    with pytest.raises(PreflightError, match="no chat template"):
        check_before_acting(config("model.path=some/model"), draws_tasks=False)
    assert asked[4:] == [SMALL_FILES] * 2


def test_without_a_download_only_a_models_small_files_are_fetched(config, model, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda path, allow_patterns, **_: asked.append(allow_patterns) or str(model),
    )
    check_before_start(config("model.path=some/model"), download=False)
    assert asked == [SMALL_FILES]


def test_of_a_model_on_the_hub_nothing_is_downloaded_that_nobody_reads(model, monkeypatch):
    """Llama's have all weights a second time below original/, SmolLM2's nine times below onnx/, others in two forms."""
    from huggingface_hub.utils import filter_repo_objects

    read = ["config.json", "merges.txt", "model-00001-of-00001.safetensors", "tokenizer.json"]
    others = [
        "original/consolidated.00.pth",
        "onnx/model_q4.onnx",
        "8bit/model.safetensors",
        "pytorch_model.bin",
        "x.gguf",
    ]
    fetched = []

    def download(path, **patterns):
        fetched.extend(filter_repo_objects([*read, *others], **patterns))
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_model("some/model")
    assert fetched == read


def test_a_model_of_the_hub_without_weights_that_the_engine_reads_is_refused(config, model, monkeypatch):
    """Older ones have pytorch_model.bin only; and of one in a cache there may be no more than the small files."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda path, **_: str(model))
    (model / "model.safetensors").unlink()
    assert "model.path = 'some/model' came without weights" in refusal(config("model.path=some/model"))
    check_before_start(config("model.path=some/model"), download=False)


def test_demo_model_that_cannot_be_unpacked_names_the_variable(config, monkeypatch):
    def full():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_folder, "ensure_demo_model", full)
    assert "No space left on device; AGENTFLOW_CACHE moves" in refusal(config("model.path=demo"))


def test_context_longer_than_the_models_is_refused(config):
    assert "max_model_len = 4096 is more than the 2048" in refusal(config("rollout.engine.max_model_len=4096"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("envs.mix={nonsense=1}", "unknown data set 'nonsense'; known: "),
        ("envs.data_path=/does/not/exist", "'/does/not/exist' is no file"),
        ("learner.num_threads=100000", "set learner.num_threads="),
        ("rollout.num_workers=100000", "set rollout.num_workers="),
        ("envs.mix={game24=1}", "or set cold_start.num_demonstrations = 0"),
    ],
)
def test_setting_that_cannot_work_here_is_named(config, override, said):
    assert said in refusal(config(override))


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        ("{lookup=0.5, game24=0.5}", "names 'game24', which is none; leave it out, or set envs.choice = 'mix'"),
        ("{lookup=1.0, chain=0.0}", "names one, 'lookup'; name another, or set envs.choice = 'mix'"),
    ],
)
def test_choice_between_families_needs_two_and_nothing_else(config, mix, said):
    refused = refusal(config(f"envs.mix={mix}", "envs.choice=learnable"))
    assert f"(arith, lookup, two_lookup, three_lookup, chain, branch), and envs.mix {said}" in refused


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["envs.datasets={words={source='words:load'}}"], "two_lookup = 0.4} would be drawn; set envs.mix={words=1.0}"),
        (["envs.data_path=questions.jsonl"], "is read by none of "),
        (
            ["envs.data_path=questions.jsonl", "envs.mix={lookup=1.0}"],
            "is read by none of 'lookup'; put one of own_text",
        ),
    ],
)
def test_tasks_that_somebody_brought_and_nothing_draws_are_refused(config, tmp_path, monkeypatch, settings, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.jsonl").write_text('{"question": "Who?", "answer": "you"}\n')
    assert said in refusal(config(*settings))


def test_choice_between_two_families_may_begin(config):
    check_before_start(config("envs.mix={lookup=0.5, chain=0.5}", "envs.choice=learnable"))


def test_more_held_out_tasks_than_the_file_has_are_refused(config, tmp_path):
    file = tmp_path / "hands.jsonl"
    file.write_text('{"id": "a", "numbers": [1, 2, 3, 4]}\n')
    settings = ("envs.mix={game24=1}", f"envs.data_path={file}", "cold_start.num_demonstrations=0")
    assert "'game24' has no task for training" in refusal(config(*settings, "evaluation.num_tasks=1"))
    assert "300 eval tasks of 'game24' were asked for, it has 1; set evaluation.num_tasks=1 or add rows" in refusal(
        config(*settings)
    )


@pytest.mark.parametrize(
    ("for_prm", "says"),
    [
        (0, r"cannot be drawn: 'mine' \(tasks_for_a_prm:load\) has 24 tasks and none for 'prm'; .*credit=outcome$"),
        (1, r"a PRM needs two tasks, .*, and envs\.mix has 1 for it; add some, or credit by outcomes alone"),
    ],
)
def test_a_run_without_tasks_for_its_prm_is_refused_before_anything_starts(
    config, tmp_path, monkeypatch, for_prm, says
):
    """Regression: it ended in a traceback after its cold start and its first evaluation."""
    (tmp_path / "tasks_for_a_prm.py").write_text(
        f"def load():\n    splits = ['prm'] * {for_prm} + ['train', 'eval'] * 12\n"
        "    return [{'question': f'q{n}', 'answer': 'x', 'split': split} for n, split in enumerate(splits)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tasks_for_a_prm", raising=False)
    module_tasks.cache_clear()
    source = "envs.datasets={mine={source='tasks_for_a_prm:load', scorer='text'}}"
    settings = ["envs.mix={mine=1}", source, NO_COLD_START, "evaluation.num_tasks=2", "label.type=monte_carlo"]
    with pytest.raises(PreflightError, match=says) as caught:
        check_before_start(config(*settings), with_prm=True)
    assert "\n" not in str(caught.value)
    check_before_start(config(*settings, "reward.credit=outcome"))


@pytest.mark.parametrize("mix", ["{own_text=1}", "{own_text=0.3,lookup=0.7}"])
def test_too_few_held_out_rows_say_which_setting_fits_and_it_does(config, tmp_path, mix):
    file = tmp_path / "mine.jsonl"
    rows = [{"question": f"q{n}", "answer": "a", "split": "train" if n % 2 else "eval"} for n in range(14)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"envs.mix={mix}", f"envs.data_path={file}", "cold_start.num_demonstrations=0"]
    said = refusal(config(*settings))
    assert "eval tasks of 'own_text' were asked for, it has 7; set evaluation.num_tasks=" in said
    assert said.endswith(" or add rows")
    [advice] = re.findall(r"set (evaluation.num_tasks=\d+)", said)
    check_before_start(config(*settings, advice))
    more = f"evaluation.num_tasks={int(advice.partition('=')[2]) + 1}"
    assert refusal(config(*settings, more)).endswith(f"set {advice} or add rows")


def test_questions_of_both_halves_that_read_alike_are_told(config, tmp_path):
    file = tmp_path / "mine.jsonl"
    texts = {
        "train": ["A farmer has 31 hens and sells 12 of them at the market. How many hens are left?", "Who wrote it?"],
        "eval": ["A farmer has 31 hens and sells 12 of them on the market. How many hens remain?", "Where is Oslo?"],
    }
    rows = [{"question": q, "answer": "19", "split": split} for split in texts for q in texts[split]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = config("envs.mix={own_text=1}", f"envs.data_path={file}", "evaluation.num_tasks=2")
    [note] = notes_before_start(own)
    assert "1 of 2 training questions of own_text read like a held-out one, first own_text-1" in note
    assert notes_before_start(config("envs.mix={game24=1}")) == []


def test_training_questions_are_compared_with_those_that_evaluation_asks(config, tmp_path):
    """Regression: all of a file were compared with each other, in silence and in the square of their number."""
    file = tmp_path / "mine.jsonl"
    questions = [f"In which year did ship number {number} leave the harbour of the town?" for number in range(40)]
    rows = [{"question": question, "answer": "1", "split": "eval"} for question in questions]
    settings = ["envs.mix={own_text=1}", f"envs.data_path={file}", "evaluation.num_tasks=1"]
    for trained in ("Who wrote it?", "Where is Oslo?"):
        rows.append({"question": trained, "answer": "1", "split": "train"})

    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [asked] = evaluation_tasks(config(*settings))
    other = {"question": "What does a farmer do who has 31 hens, and sells 12 on the market?", "answer": "1"}
    alike = {"question": "What does a farmer do who has 31 hens, and sells 12 at the market?", "answer": "1"}
    number = questions.index(asked.question)
    for place, told in ((number, 1), ((number + 1) % 40, 0)):
        found = list(rows)
        found[place] = other | {"split": "eval"}
        file.write_text("".join(json.dumps(row) + "\n" for row in [*found, alike | {"split": "train"}]))
        assert len(notes_before_start(config(*settings))) == told


@pytest.fixture
def sharing(config, tmp_path, monkeypatch):
    """A recipe with three data sets of the same question: `own_text` trains on it, `held` and `known` hold it out."""
    (tmp_path / "sharing_tasks.py").write_text(
        "def held():\n"
        "    yield {'question': 'Who wrote  it', 'answer': 'x', 'split': 'eval'}\n"
        "    yield {'question': 'Who else?', 'answer': 'x', 'split': 'train'}\n"
        "def known():\n"
        "    yield {'question': 'WHO wrote it?', 'answer': 'x', 'split': 'eval'}\n"
        "    yield {'question': 'When?', 'answer': 'x', 'split': 'train'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [("who wrote it?", "train"), ("Where?", "eval")]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": "x", "split": split}) + "\n" for q, split in rows))

    def build(*overrides):
        sources = [f"{name} = {{source = 'sharing_tasks:{name}', scorer = 'text'}}" for name in ("held", "known")]
        own = (f"envs.data_path={file}", f"envs.datasets={{{', '.join(sources)}}}", "evaluation.num_tasks=2")
        return config(*own, NO_COLD_START, *overrides)

    yield build
    sys.modules.pop("sharing_tasks", None)


@pytest.mark.parametrize(
    ("mix", "asked", "said"),
    [
        (["envs.mix={own_text=1, held=1}"], 2, "{own_text = 1.0, held = 1.0}"),
        (["envs.mix={own_text=1}", "evaluation.mix={held=1}", "evaluation.num_tasks=1"], 1, "{own_text = 1.0}"),
    ],
)
def test_held_out_question_that_another_data_set_trains_on_is_refused(sharing, mix, asked, said):
    message = (
        f"training on envs.mix = {said} meets 1 of {asked} held-out tasks, first held-1 of 'held'; leave such "
        "questions out of one of the data sets, or hold them out in all of them by their 'split'"
    )
    assert refusal(sharing(*mix)) == message
    with pytest.raises(PreflightError) as caught:
        check_before_acting(sharing(*mix), draws_tasks=True)
    assert str(caught.value) == message


def test_question_that_two_data_sets_hold_out_may_be_asked_in_both(sharing):
    check_before_start(sharing("envs.mix={own_text=0, known=1, held=1}"))
    check_before_start(sharing("envs.mix={own_text=0, known=1}", "evaluation.mix={held=1}", "evaluation.num_tasks=1"))


def test_reference_that_its_own_scorer_would_not_accept_is_refused(config, tmp_path):
    file = tmp_path / "mine.jsonl"
    rows = [
        '{"question": "1 + 1?", "answer": "2", "split": "eval"}',
        '{"question": "?", "answer": "x", "split": "train"}',
    ]
    file.write_text("\n".join(rows))
    settings = (f"envs.data_path={file}", "cold_start.num_demonstrations=0", "evaluation.num_tasks=1")
    assert "own_math-2 has the answer 'x', which is none for 'own_math'" in refusal(
        config("envs.mix={own_math=1}", *settings)
    )
    check_before_start(config("envs.mix={own_text=1}", *settings))


def test_unmerged_adapters_have_ranks_that_the_engine_can_reserve(config):
    native = "rollout.engine.adapter_mode=native"
    assert "model.lora_rank = 12 does not fit" in refusal(config(native, "model.lora_rank=12"))
    check_before_start(config(native, "model.lora_rank=16"))


def test_cuda_is_refused_on_a_driver_that_is_too_old(config, monkeypatch):
    monkeypatch.setattr(machine, "card_driver", lambda: "535.183.01")
    monkeypatch.setattr(machine, "_num_gpus", lambda: 1)
    with pytest.raises(PreflightError, match=r"driver is 535.*, and CUDA 13 needs 580 or newer"):
        check_before_start(config("learner.device=cuda"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gemma3_text"}, "has model_type 'gemma3_text'; known are llama, qwen2, qwen3"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "is a mixture of experts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised; the learner trains on bfloat16 or float32"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "reads a sliding window"),
        ({"hidden_size": None}, "is incomplete or broken"),
    ],
)
def test_a_model_that_the_learner_cannot_train_is_refused_before_its_weights_are_downloaded(
    config, model, monkeypatch, changes, says
):
    (model / "config.json").write_text(json.dumps(SHAPE | changes))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda path, **_: str(model))
    assert says in refusal(config("model.path=some/model"))


def test_the_model_under_a_prm_is_of_a_family_that_is_computed_whole(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "gemma2"}))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda path, **_: str(tmp_path))
    with pytest.raises(PreflightError, match=r"prm.model_path = 'some/prm' has model_type 'gemma2'; known are llama"):
        model_folder.prm_base("some/prm")


def test_an_engine_over_cards_that_do_not_divide_the_models_layers_is_refused(config, model):
    """Four heads of queries, two of keys."""
    on_cards = ("rollout.engine.device=cuda", "rollout.engine.adapter_mode=native")
    for cards in (1, 2, 4):
        model_folder._check_shape(config(*on_cards, f"rollout.engine.tensor_parallel={cards}"), model)
    with pytest.raises(PreflightError, match=r"tensor_parallel = 3 does not divide .* has 4 heads .*; use 2 or 4 "):
        model_folder._check_shape(config(*on_cards, "rollout.engine.tensor_parallel=3"), model)


def test_layers_that_the_model_lacks_carry_no_adapter(config):
    assert "model.lora_targets names 'c_attn', which" in refusal(config('model.lora_targets=["c_attn"]'))


@pytest.mark.parametrize(("layers", "refused"), [(36, True), (2, False)])
def test_a_large_model_on_a_card_is_not_merged_anew_for_every_version(config, tmp_path, layers, refused):
    """Of Qwen3-8B's sizes: 8,190,735,360 weights, or with 2 of its 36 layers 1.6e9."""
    sizes = {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8}
    shape = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960}
    (tmp_path / "config.json").write_text(
        json.dumps(sizes | shape | {"num_hidden_layers": layers, "tie_word_embeddings": False})
    )
    (tmp_path / "model.safetensors").touch()
    large = (f"model.path={tmp_path}", "rollout.engine.device=cuda")
    if refused:
        with pytest.raises(PreflightError, match=r"8,190,735,360 .* set rollout\.engine\.adapter_mode=native"):
            model_folder._check_shape(config(*large), tmp_path)
    else:
        model_folder._check_shape(config(*large), tmp_path)
    model_folder._check_shape(config(*large, "rollout.engine.adapter_mode=native"), tmp_path)
    model_folder._check_shape(config(*large, "rollout.engine.device=cpu"), tmp_path)


def test_cuda_is_refused_without_a_gpu_and_with_too_few(config, monkeypatch):
    everything = ("rollout.engine.device=cuda", "learner.device=cuda", "rollout.num_workers=2")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine, "_num_gpus", lambda: 0)
    assert "has no CUDA GPU" in refusal(config(*everything))
    monkeypatch.setattr(machine, "_num_gpus", lambda: 1)
    assert "set rollout.num_workers to at most 1" in refusal(config(*everything))
    monkeypatch.setattr(machine, "_num_gpus", lambda: 2)
    check_before_start(config(*everything))


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "says"),
    [
        # 0.4 + 0.4 + 0.3 of one card.
        (("card.prm=0.3",), 1, "learner 0.4, engine 0.4, PRM 0.3"),
        (("card.prm=0.2",), 1, None),
        # 0.6 + 0.3 on one card, 0.6 on the other.
        (("card.learner=0.6", "card.engine=0.6", "card.prm=0.3"), 2, None),
        (("card.learner=0.6", "card.engine=0.6", "rollout.num_workers=2"), 2, "set rollout.num_workers to at most 1"),
        # The shared card is whole; a further engine needs another.
        (("card.shared=true", "rollout.num_workers=2"), 1, "set rollout.num_workers to at most 1"),
        (("card.shared=true", "rollout.num_workers=3"), 2, None),
    ],
)
def test_every_process_on_a_card_is_counted_by_its_share(config, monkeypatch, overrides, num_gpus, says):
    cards = ("rollout.engine.device=cuda", "learner.device=cuda", "prm.device=cuda", "reward.credit=outcome_gated")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine, "_num_gpus", lambda: num_gpus)
    asked = config(*cards, *overrides)
    if says is None:
        machine.check_machine(asked)
    else:
        with pytest.raises(PreflightError, match=says):
            machine.check_machine(asked)


def test_another_clusters_machines_are_not_judged_by_this_one(config, monkeypatch):
    monkeypatch.setattr(machine, "_num_gpus", lambda: 0)
    check_before_start(config("cluster.address=auto", "rollout.engine.device=cuda", "learner.num_threads=64"))


def test_web_search_needs_its_key_and_the_key_is_never_said(config, monkeypatch):
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)
    assert "needs TAVILY_API_KEY" in refusal(config("envs.search=tavily"))
    check_before_start(config("envs.search=tavily", 'envs.actions=["code", "answer"]', NO_COLD_START))
    monkeypatch.setenv("TAVILY_API_KEY", "secret")
    assert "secret" not in refusal(config("envs.search=tavily", "envs.mix={nonsense=1}"))


def test_sandbox_is_only_needed_where_the_agent_writes_code(config, monkeypatch):
    def refuse(settings):
        raise SandboxRefusedError("no landlock")

    monkeypatch.setattr("envs.sandbox.Sandbox", refuse)
    asks_for_code = 'envs.actions=["search", "code", "answer"]'
    without = """no landlock, or leave 'code' out: envs.actions='["search", "answer"]'"""
    assert refusal(config(asks_for_code, NO_COLD_START)) == without
    with pytest.raises(PreflightError) as caught:
        check_before_acting(config(asks_for_code), draws_tasks=False)
    assert str(caught.value) == without
    assert check_before_start(config('envs.actions=["search", "answer"]', NO_COLD_START)).sandbox is None


def test_advice_to_leave_code_out_leaves_out_the_demonstrations_that_call_it(config, monkeypatch):
    def refuse(settings):
        raise SandboxRefusedError("no landlock")

    monkeypatch.setattr("envs.sandbox.Sandbox", refuse)
    said = refusal(config())
    assert said.endswith(f"""envs.actions='["think", "search", "answer"]' {NO_COLD_START}""")
    check_before_start(config(*shlex.split(said.partition("out: ")[2])))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ['envs.actions=["think","search","answer"]'],
            """that call 'code', which envs.actions = ["think", "search", "answer"] leaves out; switch it on, or set""",
        ),
        (
            ['envs.actions=["answer"]'],
            """that call 'search' and 'code', which envs.actions = ["answer"] leaves out; switch them on, or set""",
        ),
        (
            ["envs.mix={lookup=1, three_lookup=1}", "agent.max_steps=4"],
            "of up to 5 steps (search, search, search, code, answer), and agent.max_steps = 4; set "
            "agent.max_steps=5, or",
        ),
    ],
)
def test_plan_that_the_planner_cannot_play_is_refused_before_anything_starts(config, settings, said):
    assert refusal(config(*settings)) == f"the cold start plays plans {said} {NO_COLD_START}"
    check_before_start(config(*settings, NO_COLD_START))


def test_plans_are_checked_as_they_are_played(config):
    """Wrong on purpose, these two are guesses."""
    guesses = ("seed=1", "cold_start.num_demonstrations=2", "cold_start.wrong_share=1", "envs.mix={arith=1}")
    check_before_start(config(*guesses, 'envs.actions=["answer"]', "agent.max_steps=1"))


def test_attempts_that_another_command_collected_are_not_taken_for_a_new_runs_own(config, tmp_path):
    """Regression: a PRM learned from the attempts of whichever policy `agentflow collect` was given."""
    collected = tmp_path / "runs" / "run" / "collected"
    collected.mkdir(parents=True)
    with_prm = config("reward.credit=outcome_gated", "label=plan")
    check_before_start(with_prm, with_prm=True)
    (collected / "shard-00000.jsonl").touch()
    with pytest.raises(PreflightError, match=r"/collected' holds trajectories of `agentflow collect`, and .* name="):
        check_before_start(with_prm, with_prm=True)
    check_before_start(with_prm)
    (collected.parent / "config.json").write_text(with_prm.model_dump_json())
    check_before_start(with_prm, with_prm=True)


def test_run_folder_below_a_file_is_refused(config, tmp_path):
    (tmp_path / "runs").touch()
    assert "is not writable" in refusal(config())


def test_another_run_is_never_overwritten_but_an_empty_folder_may_be_used_and_the_same_run_continued(config, tmp_path):
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    check_before_start(config())
    (folder / "config.json").touch()
    assert "holds a run whose config.json cannot be read" in refusal(config())
    (folder / "config.json").write_text(config().model_dump_json())
    check_before_start(config())
    own = f"(seed); choose another name=...; `agentflow resume {folder}` continues that run with its own"
    assert f"run folder '{folder}' holds a run with other settings {own}" in refusal(config("seed=7"))
    check_before_acting(config(), draws_tasks=True)


def test_a_run_goes_on_with_as_many_threads_and_workers_as_a_smaller_machine_has_room_for(
    config, tmp_path, monkeypatch, capsys
):
    """Regression: it was refused with settings that `agentflow resume` does not take."""
    large = ("rollout.engine.num_threads=8", "learner.num_threads=2", "prm.num_threads=8", "rollout.num_workers=6")
    begun = config(*large, "reward.credit=outcome_gated", "label=plan")
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(begun.model_dump_json())
    (folder / "provenance.json").write_text('{"with_prm": false}')
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    started = []
    monkeypatch.setattr("ray_jobs.train.run_training", lambda config, *_, **__: started.append(config))
    monkeypatch.setattr("ray_jobs.run.begun.begun_config", lambda _: begun)
    training.resume(folder)
    [found] = started
    threads = (found.rollout.engine.num_threads, found.learner.num_threads, found.prm.num_threads)
    assert (*threads, found.rollout.num_workers) == (3, 2, 3, 2)
    assert (
        "this machine has 3 cores: goes on with rollout.engine.num_threads=3, prm.num_threads=3, rollout.num_workers=2"
    ) in capsys.readouterr().out
    assert "rollout.engine.num_threads = 8 is more than this machine's 3 cores" in refusal(begun)


def test_checks_of_a_cpu_run_do_not_import_torch():
    import subprocess

    code = (
        "import sys\nfrom configs.loading import load_run_config\nfrom ray_jobs.run import preflight\n"
        "given = ['model.path=/none', 'envs.actions=[\"answer\"]']\n"
        "for more in ([], ['cold_start.num_demonstrations=0']):\n"
        "    try: preflight.check_before_start(load_run_config(None, [*given, *more]))\n"
        "    except preflight.PreflightError: pass\n"
        "sys.exit(len({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_labeller_that_knows_only_generated_tasks_is_not_asked_about_others(config):
    with pytest.raises(PreflightError, match=r"'aime' in envs\.mix; use 'monte_carlo' or 'judge'"):
        check_labelling(config("envs.mix={lookup=0.5, aime=0.5}"))
    check_labelling(config("envs.mix={lookup=0.5, aime=0.5}", "label.type=monte_carlo"))


def test_only_continuations_label_the_steps_of_an_agent_of_ones_own(config):
    own = ("agent.function=mine:solve", "cold_start.num_demonstrations=0", "reward.credit=outcome")
    with pytest.raises(PreflightError, match=r"'judge' knows the planner's decisions only, not those of agent\.type"):
        check_labelling(config(*own, "label.type=judge", "label.judge.model=m"))
    check_labelling(config(*own, "label.type=monte_carlo"))


def test_judge_whose_key_is_missing_is_one_line(config, monkeypatch):
    judge = ("label.type=judge", "label.judge.model=m", "label.judge.api_key_env=SOME_KEY")
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(ApiKeyError, match="names SOME_KEY"):
        check_judge_key(config(*judge))
    monkeypatch.setenv("SOME_KEY", "k")
    check_judge_key(config(*judge))


def test_a_prompt_that_leaves_no_room_is_refused(config):
    said = refusal(config("agent.prompt.instructions=" + "word " * 2000))
    assert re.match(r"agent\.prompt takes \d{5} tokens, and agent\.max_steps \* rollout\.max_turn_tokens = 320: ", said)
    assert (
        "leave no room for task and results in rollout.engine.max_model_len = 1024; shorten it, or raise that" in said
    )


def test_an_example_that_the_planner_cannot_write_is_refused(config):
    example = 'Task: q\n{"thought":"t","action":"search","action_input":"x"}\nResult: y'
    settings = ('envs.actions=["code","answer"]', NO_COLD_START, f"agent.prompt.examples={json.dumps([example])}")
    said = refusal(config(*settings))
    assert "example 1 shows" in said
    assert said.endswith("which this planner cannot write: action must be one of code, answer")


def test_an_example_may_hold_what_separates_lines_elsewhere(config):
    example = 'Task: q\n{"thought":"a\u2028b","action":"answer","action_input":"x"}'
    check_before_start(config(NO_COLD_START, f"agent.prompt.examples={json.dumps([example])}"))


def test_a_data_set_of_the_hub_without_a_network_is_refused(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    said = refusal(config("envs.mix={sums=1}", "envs.datasets.sums.source=hf:mine/sums"))
    assert "cannot be drawn: envs.datasets.sums: the split 'train' of 'mine/sums' cannot be loaded: " in said
    assert "\n" not in said


def test_an_example_that_solves_a_held_out_task_is_refused(config, tmp_path):
    file = tmp_path / "mine.jsonl"
    rows = [{"question": f"q{n}?", "answer": "a", "split": "eval" if n else "train"} for n in range(2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    example = 'Task: Q1\n{"thought":"t","action":"answer","action_input":"a"}'
    settings = ("envs.mix={own_text=1}", f"envs.data_path={file}", "evaluation.num_tasks=1")
    prompt = f"agent.prompt.examples={json.dumps([example])}"
    said = refusal(config(*settings, "cold_start.num_demonstrations=0", prompt))
    assert said == "agent.prompt.examples: example 1 solves own_text-2, a held-out task; take another"


@pytest.mark.parametrize(("asked", "refused"), [("Answer in a word.\nQ1 ?", True), ("q2?", True), ("q0?", False)])
def test_recorded_conversation_about_a_held_out_task_is_refused(config, tmp_path, asked, refused):
    """Regression: the policy imitated the answers to the very questions that say what it has learnt."""
    file, recorded = tmp_path / "mine.jsonl", tmp_path / "chats.jsonl"
    rows = [{"question": f"q{n}?", "answer": "a", "split": "eval" if n else "train"} for n in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "a"}] for text in ("other?", asked)]
    recorded.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    own = (*OWN_AGENT, "envs.mix={own_text=1}", f"envs.data_path={file}", "evaluation.num_tasks=2")
    run = config(*own, f"cold_start={{path='{recorded}'}}")
    if not refused:
        check_before_start(run)
        return
    number = {"q2?": 3}.get(asked, 2)
    assert refusal(run) == (
        f"{recorded}, line 2: the cold start would imitate a conversation about own_text-{number}, a held-out task; "
        "leave it out of the file, or let the data set train on that question by its 'split'"
    )


def test_no_example_may_solve_one_of_the_very_tasks_that_the_run_holds_out(config, tmp_path):
    """Regression: examples were held against tasks that another seed draws."""
    file = tmp_path / "mine.jsonl"
    rows = [{"question": f"q{n}?", "answer": "a", "split": "eval" if n else "train"} for n in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("envs.mix={own_text=1}", f"envs.data_path={file}", "evaluation.num_tasks=1", NO_COLD_START)
    [asked] = evaluation_tasks(config(*settings))

    def shown(question):
        example = f'Task: {question}\n{{"thought":"t","action":"answer","action_input":"a"}}'
        return config(*settings, f"agent.prompt.examples={json.dumps([example])}")

    assert f"example 1 solves {asked.id}, a held-out task" in refusal(shown(asked.question))
    check_before_start(shown(next(row["question"] for row in rows[1:] if row["question"] != asked.question)))
