"""Checks of a recipe's tasks: data sets, counts, references, demonstrations, and held-out questions."""

import json
import sys

import pytest

from configs.errors import UserError
from configs.loading import load_run_config
from envs.datasets.custom import read_source
from envs.datasets.sampler import evaluation_tasks
from ray_jobs.run.task_checks import check_mixes, check_tasks

NO_COLD_START = "cold_start.num_demonstrations=0"


def config(*overrides):
    return load_run_config(None, overrides)


def check(*overrides, training=True):
    check_mixes(config(*overrides))
    check_tasks(config(*overrides), training=training)


def refusal(*overrides, training=True):
    with pytest.raises(UserError) as caught:
        check(*overrides, training=training)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_rows(file, *rows, scorer="text"):
    """Write questions and their halves as the data set `mine`; every answer is `a`."""
    named = ({"question": question, "answer": "a", "split": split, "scorer": scorer} for question, split in rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in named))
    read_source.cache_clear()
    return f"envs.datasets.mine.source={file}"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["envs.mix={nonsense=1}"], "envs.mix"),
        (["envs.datasets={words={source='words:load'}}"], "envs.datasets.words"),
        (["envs.datasets.aime.source=a:b"], "envs.datasets.aime"),
        (['envs.actions=["think","search","answer"]'], "envs.actions"),
        (["envs.mix={lookup=1, three_lookup=1}", "agent.max_steps=4"], "agent.max_steps=5"),
    ],
)
def test_tasks_that_cannot_work_name_the_setting(settings, named):
    assert named in refusal(*settings)


def test_reference_that_its_own_scorer_does_not_accept_is_rejected(tmp_path):
    settings, rows = (
        ("envs.mix={mine=1}", NO_COLD_START, "evaluation.num_tasks=1"),
        (("1 + 1?", "eval"), ("?", "train")),
    )
    assert "mine-" in refusal(*settings, write_rows(tmp_path / "mine.jsonl", *rows, scorer="choice"))
    check(*settings, write_rows(tmp_path / "mine.jsonl", *rows))


# --- held-out questions -------------------------------------------------------------------------------


@pytest.fixture
def sharing(tmp_path, monkeypatch):
    """Three data sets with the same question: `mine` trains on it, `held` and `known` hold it out."""
    (tmp_path / "sharing_tasks.py").write_text(
        "def held():\n"
        "    yield {'question': 'Who wrote  it', 'answer': 'x', 'split': 'eval'}\n"
        "    yield {'question': 'Who else?', 'answer': 'x', 'split': 'train'}\n"
        "def known():\n"
        "    yield {'question': 'WHO wrote it?', 'answer': 'x', 'split': 'eval'}\n"
        "    yield {'question': 'When?', 'answer': 'x', 'split': 'train'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    data = (write_rows(tmp_path / "mine.jsonl", ("who wrote it?", "train"), ("Where?", "eval")),)
    for name in ("held", "known"):
        data += (f"envs.datasets.{name}={{source='sharing_tasks:{name}', scorer='text'}}",)
    yield (*data, "evaluation.num_tasks=2", NO_COLD_START)
    sys.modules.pop("sharing_tasks", None)


def test_held_out_question_that_another_data_set_trains_on_is_rejected(sharing):
    for mix in (
        ["envs.mix={mine=1, held=1}"],
        ["envs.mix={mine=1}", "evaluation.mix={held=1}", "evaluation.num_tasks=1"],
    ):
        for training in (True, False):
            assert "held-1" in refusal(*sharing, *mix, training=training)
    check(*sharing, "envs.mix={mine=0, known=1, held=1}")
    check(*sharing, "envs.mix={mine=0, known=1}", "evaluation.mix={held=1}", "evaluation.num_tasks=1")


def test_example_that_solves_a_held_out_task_of_this_run_is_rejected(tmp_path):
    """The seed decides which rows the run holds out, and only those are compared."""
    data = write_rows(tmp_path / "mine.jsonl", *((f"q{n}?", "eval" if n else "train") for n in range(30)))
    settings = ("envs.mix={mine=1}", data, "evaluation.num_tasks=1", NO_COLD_START)
    [held_out] = evaluation_tasks(config(*settings))

    def with_example(question):
        example = f'Task: {question}\n{{"thought":"t","action":"answer","action_input":"a"}}'
        return (*settings, f"agent.prompt.examples={json.dumps([example])}")

    assert held_out.id in refusal(*with_example(held_out.question.upper()))
    check(*with_example(next(f"q{n}?" for n in (1, 2) if f"q{n}?" != held_out.question)))


@pytest.mark.parametrize(("text", "rejected"), [("Answer in a word.\nQ1 ?", True), ("q2?", True), ("q0?", False)])
def test_recorded_conversation_about_a_held_out_task_is_rejected(tmp_path, text, rejected):
    recorded = tmp_path / "chats.jsonl"
    chats = [[{"role": "user", "content": part}, {"role": "assistant", "content": "a"}] for part in ("other?", text)]
    recorded.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    data = write_rows(tmp_path / "mine.jsonl", *((f"q{n}?", "eval" if n else "train") for n in range(3)))
    agent = ("agent.command=cat", "reward.credit=outcome", f"cold_start={{path='{recorded}'}}")
    settings = (*agent, "envs.mix={mine=1}", data, "evaluation.num_tasks=2")
    if rejected:
        assert f"{recorded}, line 2" in refusal(*settings)
    else:
        check(*settings)
