"""Checks before a start: models, cards, keys, tools and the sandbox."""

import json

import numpy as np
import pytest
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file

from configs.errors import UserError
from configs.loading import load_run_config
from envs.sandbox import SandboxRefusedError, SandboxState
from ray_jobs.run import model_folder, preflight
from ray_jobs.run.preflight import check_before_acting, check_before_start
from rollout.engines.adapters import write_merged_model
from tests.rollout.chat_templates import GEMMA2, MISTRAL_V03, ROLES, tokenizer_of

NO_COLD_START = "cold_start.num_demonstrations=0"
SHAPE = {
    **{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
}
CARDS = ("rollout.engine.device=cuda", "learner.device=cuda")


PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
LAYER = [*PROJECTIONS, "input_layernorm", "post_attention_layernorm"]
NAMES = ["model.embed_tokens", "model.norm", "lm_head"] + [f"model.layers.{i}.{name}" for i in (0, 1) for name in LAYER]
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
SMALL = ["config.json", "params.json"]
"""Small files of a model on the hub."""
REPOSITORY = [*SMALL, "model.safetensors", "consolidated.safetensors", "original/model.safetensors"]


def write_weights(folder, names, file="model.safetensors", **other):
    """Write weights of one number each; `other` numbers by name, the rest is 0."""
    save_file({f"{name}.weight": np.full(1, other.get(name, 0), dtype=np.float32) for name in names}, folder / file)


def shard(folder, *others):
    """Put the weights into two files, and these files beside them."""
    (folder / "model.safetensors").unlink()
    for place, file in enumerate(SHARDS):
        write_weights(folder, NAMES[place::2], file)
    index = {f"{name}.weight": SHARDS[place % 2] for place, name in enumerate(NAMES)}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    for other in others:
        write_weights(folder, ["a"], other)


@pytest.fixture
def model(tmp_path):
    """A model folder whose weights have the right names, but no sizes; preflight only loads the tokenizer."""
    folder = tmp_path / "model"
    tokenizer_of(ROLES["chatml"]).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    write_weights(folder, NAMES)
    return folder


@pytest.fixture(autouse=True)
def sandbox(monkeypatch):
    """A sandbox that only counts its starts."""
    started = []

    class FakeSandbox:
        state = SandboxState(tier="landlock", layers=("landlock",), without="namespaces: forbidden")

        def __init__(self, settings):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            started.append(self)

    monkeypatch.setattr("envs.tools.toolbox.Sandbox", FakeSandbox)
    return started


@pytest.fixture
def config(tmp_path, model):
    def build(*overrides):
        return load_run_config(None, [f"output_dir={tmp_path}/runs", f"model.path={model}", *overrides])

    return build


@pytest.fixture
def hub(model, monkeypatch):
    """The files of every download from the model hub."""
    downloads = []

    def download(path, **patterns):
        downloads.append([*filter_repo_objects(REPOSITORY, **patterns)])
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return downloads


def refusal(config):
    with pytest.raises(UserError) as caught:
        check_before_start(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_valid_configuration_passes(config, model, sandbox, tmp_path):
    check_before_acting(config(), draws_tasks=True)
    ready = check_before_start(config())
    assert (ready.model_path, ready.sandbox.tier) == (model, "landlock")
    assert not (tmp_path / "runs").exists()
    assert len(sandbox) == 2


# --- models -------------------------------------------------------------------------------------------


def test_small_files_are_checked_before_the_download(config, model, hub):
    for template in (MISTRAL_V03, GEMMA2):
        tokenizer_of(template).save_pretrained(model)
        check_before_start(config("model.path=some/model"))
    assert hub == [SMALL, [*SMALL, "model.safetensors"]] * 2
    (model / "chat_template.jinja").unlink()
    assert "chat template" in refusal(config("model.path=some/model"))
    with pytest.raises(UserError):
        check_before_acting(config("model.path=some/model"), draws_tasks=False)
    assert hub[4:] == [SMALL] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3_moe", "num_experts": 128},
        {"quantization_config": {"quant_method": "fp8"}},
        {"model_type": "qwen2", "use_sliding_window": True},
        {"model_type": "gemma3"},
    ],
)
def test_untrainable_model_is_rejected_before_the_download(config, model, hub, changes):
    (model / "config.json").write_text(json.dumps(SHAPE | changes))
    assert "docs/your-model.md" in refusal(config("model.path=some/model"))
    with pytest.raises(UserError, match=r"prm\.model_path"):
        model_folder.prm_base("some/model")
    assert hub == [SMALL] * 2


def tie(folder, names=NAMES, **other):
    (folder / "config.json").write_text(json.dumps(SHAPE | {"tie_word_embeddings": True}))
    write_weights(folder, names, **other)


def as_peft_names_them(folder):
    write_weights(folder, [name.replace("_proj", "_proj.base_layer") for name in NAMES])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (shard, None),
        (lambda folder: shard(folder, "consolidated.safetensors", "adapter_model.safetensors"), None),
        (tie, None),
        (lambda folder: tie(folder, sorted({*NAMES} - {"lm_head"})), None),
        (lambda folder: (folder / "pytorch_model.bin").touch(), None),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "adapter_config.json"),
        (lambda folder: write_weights(folder, NAMES, "consolidated.safetensors"), "consolidated.safetensors"),
        (lambda folder: shard(folder, "model.safetensors"), SHARDS[0]),
        (lambda folder: (shard(folder), (folder / SHARDS[1]).unlink()), SHARDS[1]),
        (lambda folder: (folder / INDEX).write_text("{}"), INDEX),
        (lambda folder: (folder / "model.safetensors").write_bytes(bytes(90)), "model.safetensors"),
        (lambda folder: tie(folder, lm_head=1), "tie_word_embeddings"),
        (lambda folder: write_weights(folder, [name for name in NAMES if name != "lm_head"]), "tie_word_embeddings"),
        (lambda folder: write_weights(folder, NAMES[:-1]), NAMES[-1]),
        (as_peft_names_them, "self_attn.q_proj"),
    ],
)
def test_model_folder_that_programs_read_differently_is_refused_everywhere(config, model, change, named):
    from rollout.engines.base_weights import BaseWeights

    change(model)
    if named is None:
        check_before_start(config())
        return
    assert named in refusal(config())
    with pytest.raises(UserError):
        model_folder.prm_base(str(model))
    with pytest.raises(UserError):
        write_merged_model(model, b"", model / "out", rank=1, alpha=1.0, dtype="float32")
    with pytest.raises(UserError):
        BaseWeights(model, device="cpu", precision="float32")
    assert not (model / "out").exists()


def test_adapter_beside_a_hub_model_is_refused_before_the_download(config, model, hub):
    (model / "adapter_config.json").write_text("{}")
    assert "adapter_config.json" in refusal(config("model.path=some/model"))
    assert hub == [SMALL]


@pytest.mark.parametrize("more", [None, "rollout.engine.dtype=float32", "rollout.engine.adapter_mode=native"])
def test_merging_in_bfloat16_without_a_cold_start_is_noted(config, more):
    rounds = config("rollout.engine.dtype=bfloat16", NO_COLD_START, *([more] if more else []))
    assert len(model_folder.model_notes(rounds)) == (more is None)
    assert not model_folder.model_notes(config("rollout.engine.dtype=bfloat16"))


@pytest.mark.parametrize("more", [None, NO_COLD_START])
def test_planner_of_the_demo_model_without_a_cold_start_is_noted(config, more):
    demo = config("model.path=demo", "rollout.engine.dtype=float32", *([more] if more else []))
    notes = model_folder.model_notes(demo)
    assert ["model.path" in note for note in notes] == [True] * bool(more)


# --- machine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [CARDS, ("reward.credit=outcome_guided", "prm.device=cuda")])
@pytest.mark.parametrize(("driver", "named"), [(None, "CUDA GPU"), ("535.1", "580"), ("580.95", None)])
def test_recipe_for_a_card_needs_one_with_a_driver(config, monkeypatch, devices, driver, named):
    monkeypatch.setattr(preflight, "card_driver", lambda: driver)
    if named is None:
        check_before_start(config(*devices))
    else:
        assert named in refusal(config(*devices))
    # Another cluster's machines are not those of this one.
    check_before_start(config(*devices, "cluster.address=auto"))


# --- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["rollout.engine.max_model_len=4096"], "rollout.engine.max_model_len"),
        (['model.lora_targets=["c_attn"]'], "model.lora_targets"),
        (["rollout.engine.tensor_parallel=3", *CARDS, "rollout.engine.adapter_mode=native"], "CUDA"),
        (["reward.credit={prm_path='/does/not/exist'}"], "reward.credit.prm_path"),
        (["agent.prompt.instructions=" + "word " * 2000], "agent.prompt"),
    ],
)
def test_setting_that_cannot_work_is_named(config, overrides, named, monkeypatch):
    monkeypatch.setattr(preflight, "card_driver", lambda: None)
    assert named in refusal(config(*overrides))


def test_web_search_needs_its_key_and_no_message_holds_it(config, monkeypatch):
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)
    assert "TAVILY_API_KEY" in refusal(config("envs.search=tavily"))
    check_before_start(config("envs.search=tavily", 'envs.actions=["code", "answer"]', NO_COLD_START))
    monkeypatch.setenv("TAVILY_API_KEY", "secret")
    assert "secret" not in refusal(config("envs.search=tavily", "envs.mix={nonsense=1}"))


def test_sandbox_is_required_for_the_code_tool_only(config, monkeypatch):
    def refuse(settings):
        raise SandboxRefusedError("no landlock")

    monkeypatch.setattr("envs.tools.toolbox.Sandbox", refuse)
    for check in (check_before_start, lambda run: check_before_acting(run, draws_tasks=False)):
        with pytest.raises(UserError, match=r"envs\.actions"):
            check(config(NO_COLD_START))
    assert check_before_start(config('envs.actions=["search", "answer"]', NO_COLD_START)).sandbox is None
