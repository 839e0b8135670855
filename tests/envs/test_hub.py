"""Data sets of the Hugging Face hub, read by its own client from folders, and asked for where there is none."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.envs import OwnDatasetConfig
from configs.run import RunConfig
from envs.datasets.own import OwnSources, module_tasks
from envs.datasets.registry import load_tasks
from reward.scorers import score_answer
from tests.envs.scripted_hub import scripted_hub

CARD = """---
configs:
- config_name: easy
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
- config_name: hard
  data_files:
  - {split: train, path: test.jsonl}
---
"""


def row(first, second, **more):
    return {"problem": f"{first} + {second}?", "solution": str(first + second), "level": first, **more}


def write(path, rows):
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """What the hub would have as mine/sums: two configurations, two splits."""
    folder = tmp_path / "mine" / "sums"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    write(folder / "train.jsonl", [row(n, 1, scorer="os:system", split="eval", id=7) for n in range(40)])
    write(folder / "test.jsonl", [row(n, 100, scorer="os:system", split="x", id=7) for n in range(6)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    return {"source": "hf:mine/sums", "config": "easy", "question": "problem", "answer": "solution"}


def test_a_split_is_trained_on_and_another_held_out(sums):
    own = OwnSources(datasets={"sums": OwnDatasetConfig(**sums, eval_split="test", scorer="integer")})
    held_out = load_tasks("sums", split="eval", count=None, seed=0, own=own)
    train = load_tasks("sums", split="train", count=None, seed=0, own=own)
    prm = own.tasks("sums", "prm")
    assert sorted(task.question for task in held_out) == [f"{n} + 100?" for n in range(6)]
    assert len(train) + len(prm) == 40
    assert len(train) > len(prm) > 0
    [task] = [task for task in held_out if task.question == "5 + 100?"]
    assert (task.id, task.dataset, task.answer, task.metadata) == ("sums-test-6", "sums", "105", {"level": 5})
    assert (score_answer(task, "105"), score_answer(task, "104")) == (1.0, 0.0)


def test_without_a_held_out_split_the_hash_decides_and_a_data_set_names_no_code(sums):
    found = module_tasks("sums", OwnDatasetConfig(**sums, scorer="integer"))
    assert sum(map(len, found.values())) == 40
    assert min(len(found[part]) for part in ("train", "eval", "prm")) > 0
    # Neither a scorer, which would be called, nor a split that is not ours.
    assert {task.scorer for part in found.values() for task in part} == {"integer"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"question": "text"},
            r"envs\.datasets\.sums\.question = 'text' is no column of 'mine/sums', which has problem",
        ),
        ({"question": None}, r"envs\.datasets\.sums\.question = 'question' is no column of 'mine/sums'"),
        ({"answer": "label"}, r"envs\.datasets\.sums\.answer = 'label' is no column"),
        ({"config": "middle"}, r"the split 'train' of 'mine/sums' cannot be loaded: ValueError: .*middle.*; check the"),
        ({"eval_split": "dev"}, r"the split 'dev' of 'mine/sums' cannot be loaded: ValueError: .*dev.*; check the"),
        (
            {"source": "hf:mine/none"},
            r"the split 'train' of 'mine/none' cannot be loaded: .*; check the names and the ",
        ),
    ],
)
def test_what_cannot_be_loaded_is_one_line_that_names_the_setting(sums, changed, said):
    with pytest.raises(ValueError, match=said) as caught:
        module_tasks("sums", OwnDatasetConfig(**(sums | changed)))
    assert "\n" not in str(caught.value)


ASKS = """
import json, sys
from configs.envs import OwnDatasetConfig
from envs.datasets.own import module_tasks

for settings in json.loads(sys.argv[1]):
    try:
        found = module_tasks("sums", OwnDatasetConfig(**settings))
        print({part: len(tasks) for part, tasks in found.items()}, found["eval"][0].id)
    except ValueError as error:
        print(error)
"""


def test_a_hub_is_asked_by_its_own_client(sums, tmp_path):
    with scripted_hub(tmp_path / "mine" / "sums") as hub:
        threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
        # The client reads its settings once in a process, and a folder of this name here would come first.
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        address = f"http://127.0.0.1:{hub.server_address[1]}"
        settings = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | settings
        asked = [sums | {"eval_split": "test"}, {"source": "hf:mine/none"}]
        done = subprocess.run(
            [sys.executable, "-c", ASKS, json.dumps(asked)],
            cwd=elsewhere,
            env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
        )
        hub.shutdown()
    counts, missing = done.stdout.splitlines()
    assert counts.endswith("'eval': 6, 'demonstrations': 0, 'prm': 7} sums-test-1")
    assert missing == (
        "envs.datasets.sums: the split 'train' of 'mine/none' cannot be loaded: DatasetNotFoundError: Dataset "
        "'mine/none' doesn't exist on the Hub or cannot be accessed.; check the names and the network, and for a gated "
        "data set the login of the hub"
    )


def test_files_that_do_not_fit_together_are_told_apart(sums, tmp_path):
    write(tmp_path / "mine" / "sums" / "test.jsonl", [{"other": 1}])
    with pytest.raises(
        ValueError, match=r"the split 'train' of 'mine/sums' cannot be loaded: \w*CastError: "
    ) as caught:
        module_tasks("sums", OwnDatasetConfig(**sums))
    assert "\n" not in str(caught.value)


def test_a_question_that_stands_twice_is_refused(sums, tmp_path):
    for name in ("train", "test"):
        write(tmp_path / "mine" / "sums" / f"{name}.jsonl", [row(1, 1), row(2, 2), row(1, 1)])
    with pytest.raises(ValueError, match=r"hf:mine/sums: the question '1 \+ 1\?' stands in 2 rows; keep one of them"):
        module_tasks("sums", OwnDatasetConfig(**sums))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"source": "hf:"}, "must be module:name of a function, as in my_tasks:load, or hf:owner/name"),
        ({"source": "hf:/etc/passwd"}, "must be module:name"),
        ({"source": "my_tasks:load", "split": "test"}, "split is for a data set of the hub, hf:owner/name"),
        ({"source": "hf:a/b", "eval_split": "train"}, "eval_split = 'train' is trained on; name another"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ValidationError, match=said):
        OwnDatasetConfig(**settings)


def test_a_recipe_with_a_data_set_of_the_hub_names_no_code(sums):
    envs = {"datasets": {"sums": sums}}
    assert not RunConfig(envs=envs).names_code
    assert RunConfig(envs={"datasets": {"sums": sums | {"scorer": "my_reward:score"}}}).names_code
