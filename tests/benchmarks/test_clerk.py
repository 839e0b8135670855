"""The clerk's world, its agent behind the endpoint, and that both trainers are told the same."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted import ScriptedEngine, ScriptedTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from benchmarks import skill_job
from benchmarks.clerk import ASKED, MAX_LOOKS, PAGES, SIZES, result_of, said_last, score, solved, tasks, teach
from configs.loading import load_run_config
from envs.datasets.own import OwnSources
from envs.datasets.sampler import cold_start_tasks, evaluation_tasks, training_tasks
from envs.datasets.split import question_key
from rollout.agent.custom import CustomAgent, build_solving, rules_of
from rollout.chat import ChatFormat
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import engine_writers

CHAT = ChatFormat(ScriptedTokenizer())
ROWS = list(tasks())


@pytest.fixture
def config():
    return load_run_config(skill_job.recipe("clerk"), [])


def called(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def numbers_of(row):
    """What the page says that the lot's page leads to."""
    return dict(entry.split() for entry in PAGES[PAGES[row["lot"]]].split(", "))


# --- the world ---------------------------------------------------------------------------------------


def test_two_looks_lead_to_the_answer_of_every_task():
    for row in ROWS:
        (asked,) = set(ASKED) & set(row["question"].split())
        assert row["lot"] in row["question"]
        assert numbers_of(row)[asked] == row["answer"]


def test_the_first_page_has_no_number_and_the_other_number_of_the_second_is_wrong():
    for row in ROWS:
        assert not any(one.isdigit() for one in PAGES[row["lot"]])
        assert [*numbers_of(row).values()].count(row["answer"]) == 1


def test_tasks_are_the_same_each_time_of_every_kind_and_each_about_a_lot_of_its_own():
    assert list(tasks()) == ROWS
    assert {split: sum(row["split"] == split for row in ROWS) for split in SIZES} == SIZES
    assert len({row["lot"] for row in ROWS}) == len(ROWS)
    for split in SIZES:
        kinds = Counter(row["question"].split()[3] for row in ROWS if row["split"] == split)
        assert kinds == dict.fromkeys(ASKED, SIZES[split] // 2)


def test_held_out_tasks_are_neither_trained_nor_taught(config):
    held_out, sampler = evaluation_tasks(config), training_tasks(config)
    trained = [sampler.task(ordinal) for ordinal in range(skill_job.NUM_PROMPTS)]
    taught = [one.task for one in cold_start_tasks(config)]
    assert (len(held_out), len({task.question for task in trained}), len(taught)) == (200, 2000, 256)
    met = {question_key(one.question) for one in trained + taught}
    assert not {question_key(one.question) for one in held_out} & met
    assert len(met) == 2256


@pytest.mark.parametrize(
    ("text", "right"),
    [("17", True), (" 17\n", True), ("017", False), ("17.", False), ("31", False), ("price 17", False), ("", False)],
)
def test_right_is_the_number_alone(text, right):
    assert solved(text, "17") == float(right)


def test_a_look_that_fails_says_why():
    assert result_of("look", '{"entry": "Nobody"}') == "no such entry"
    assert result_of("find", '{"entry": "red lamps"}') == "{'error': 'Tool find not found.'}"
    assert result_of("look", "{}") == "{'error': \"look() missing 1 required positional argument: 'entry'\"}"
    assert result_of("look", '{"entry": {"lot": 1}}') == "no such entry"


def test_the_answer_is_what_is_said_last_and_not_a_call():
    call = {"role": "assistant", "content": "17", "tool_calls": [{"id": "1"}]}
    result = {"role": "tool", "content": "17"}
    assert said_last([call, result, {"role": "assistant", "content": "31"}]) == "31"
    assert [said_last(messages) for messages in ([call], [call, result])] == ["", ""]


async def test_its_teacher_stops_after_the_first_look_in_four_of_five_tasks_and_is_wrong_there(config):
    found, looks = OwnSources.of(config).tasks("clerk", "demonstrations"), Counter()
    for task in found:
        messages = [{"role": "user", "content": task.question}]
        while not isinstance(said := await teach(task, messages, []), str):
            entry = json.loads(said["tool_calls"][0]["function"]["arguments"])["entry"]
            messages += [said, {"role": "tool", "content": PAGES[entry]}]
        num_looks = len(messages) // 2
        looks[num_looks] += 1
        assert score(task, said) == float(num_looks == 2)
        assert int(said) in range(10, 100)
    assert looks.keys() == {1, 2}
    assert 0.72 < looks[1] / len(found) < 0.88


# --- the agent ---------------------------------------------------------------------------------------


async def attempt(config, *texts):
    """The trajectory of the first task, and what the policy was asked."""
    engine, endpoint = ScriptedEngine(texts), Endpoint()
    # The scripted tokenizer has an id per character.
    rules = replace(rules_of(config), max_tokens=200, max_context_tokens=20_000)
    solving = build_solving(config.agent, None)
    writers = engine_writers(engine, 1.0)
    agent = CustomAgent(solving, endpoint, writer=writers, chat=CHAT, rules=rules, timeout_s=120)
    task = cold_start_tasks(config)[0].task
    trajectory = await agent.run(task, trajectory_id="g/0", group_id="g")
    endpoint.close()
    return trajectory, [
        ScriptedTokenizer().decode(one.prompt_token_ids, skip_special_tokens=True) for one in engine.requests
    ]


def first_row(config):
    question = cold_start_tasks(config)[0].task.question
    return next(row for row in ROWS if row["question"] == question)


async def test_the_agent_looks_reads_looks_again_and_answers_in_one_dialogue(config):
    row = first_row(config)
    article = PAGES[row["lot"]]
    looks = called("look", entry=row["lot"]), called("look", entry=article)
    trajectory, prompts = await attempt(config, *looks, f" {row['answer']} ")
    assert (trajectory.failure, trajectory.branches) == (None, ((0, 1, 2),))
    assert score(trajectory.task, trajectory.answer) == 1.0
    assert [turn.tool_result.text for turn in trajectory.turns[:2]] == [article, PAGES[article]]
    assert prompts[2].startswith(prompts[1] + looks[1])
    assert prompts[2].endswith(f"user:<tool_response>\n{PAGES[article]}\n</tool_response>assistant:")


async def test_an_attempt_that_only_looks_has_no_answer_and_is_wrong(config):
    trajectory, prompts = await attempt(config, *[called("look", entry="red lamps")] * (MAX_LOOKS + 2))
    assert (len(prompts), trajectory.failure, trajectory.answer) == (MAX_LOOKS + 1, None, "")
    assert score(trajectory.task, trajectory.answer) == 0.0


@pytest.mark.parametrize("said", [called("find", entry="red lamps"), called("look"), "<tool_call>\n{", "", "I thi…"])
async def test_a_model_that_errs_in_every_reply_is_wrong_and_not_unscored(config, said):
    trajectory, _ = await attempt(config, *[said] * (MAX_LOOKS + 1))
    assert trajectory.failure is None
    assert score(trajectory.task, trajectory.answer) == 0.0


# --- the trainer of TRL ------------------------------------------------------------------------------


@pytest.fixture
def peer(monkeypatch):
    """Imported as it is in an environment that has nothing of this project."""
    monkeypatch.syspath_prepend(Path(skill_job.__file__).parent)
    return __import__("skill_peer")


@pytest.fixture
def job(config, monkeypatch):
    monkeypatch.setattr(skill_job, "build_chat", lambda _: CHAT)
    monkeypatch.setattr(skill_job, "trl_settings", lambda *_, **__: {"max_tokens": 40})
    monkeypatch.setattr(skill_job, "resolve_model", lambda path: path)
    return skill_job.trl_job(config, Path("start"), "float32:4", every=1)


def text_of(token_ids):
    return "".join({0: "<|im_start|>", 1: "<|im_end|>"}.get(one, chr(one)) for one in token_ids)


def test_the_trainer_is_told_the_clerks_job(job):
    assert (job["kind"], job["adapter"], job["every"], job["max_tokens"]) == ("clerk", "start", 1, 192)
    assert len(job["rows"]) == 2000
    row = next(row for row in ROWS if row["question"] == job["rows"][0]["prompt"][-1]["content"])
    assert job["rows"][0]["answer"] == row["answer"]
    assert [message["role"] for message in job["rows"][0]["prompt"]] == ["system", "user"]
    assert '{"name": "look", ' in job["rows"][0]["prompt"][0]["content"]


def test_every_page_stands_between_two_replies_as_our_endpoint_puts_it_there(job):
    told = {one["results"][0]: text_of(one["token_ids"]) for one in job["between"] if len(one["results"]) == 1}
    assert set(told) == {*PAGES.values(), "no such entry", "{'error': 'Tool find not found.'}"}
    page = PAGES["red lamps"]
    assert told[page] == f"<|im_start|>user:<tool_response>\n{page}\n</tool_response><|im_end|><|im_start|>assistant:"


def rendered(peer, messages, **more):
    return render_jinja_template([messages], chat_template=peer.CHAT_WITH_TOOLS, **more)[0][0]


def calling(content, *entries):
    calls = [{"type": "function", "function": {"name": "look", "arguments": {"entry": entry}}} for entry in entries]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def test_its_template_writes_calls_and_results_as_the_endpoint_does(peer):
    results = [{"role": "tool", "name": "look", "content": content} for content in ("one", "two")]
    messages = [{"role": "user", "content": "?"}, calling("So:", "a", "b"), *results]
    assert rendered(peer, messages, add_generation_prompt=True) == (
        "<|im_start|>user\n?<|im_end|>\n"
        f"<|im_start|>assistant\nSo:\n{called('look', entry='a')}\n{called('look', entry='b')}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    alone = [calling("", "a"), results[0], calling("", "b"), results[1]]
    assert rendered(peer, alone) == "".join(
        f"<|im_start|>assistant\n{called('look', entry=entry)}<|im_end|>\n"
        f"<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n"
        for entry, content in (("a", "one"), ("b", "two"))
    )


def test_its_reward_is_that_of_what_an_attempt_says_last(peer):
    result = {"role": "tool", "name": "look", "content": "17"}
    answers = [[calling("", "a"), result, {"role": "assistant", "content": said}] for said in ("17", "31")]
    assert peer.clerk_rewards([*answers, [calling("17", "a")]], ["17"] * 3, prompts=[]) == [1.0, 0.0, 0.0]
    assert peer.SKILLS["clerk"].tools[0]("red lamps") == PAGES["red lamps"]
    assert peer.SKILLS["clerk"].settings == {"max_tool_calling_iterations": MAX_LOOKS}
    assert peer.expressions_rewards(["(64-17)*3", "141"], [[64, 17, 3]] * 2, [141] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(("prompt", "between"), [([1], [9]), ([8], [2])])
def test_a_trainer_that_would_see_other_tokens_does_not_begin(peer, prompt, between):
    trainer = SimpleNamespace(_tokenize_prompts=lambda _: ([prompt],), _get_tool_suffix_ids=lambda _: between)
    job = {"rows": [{"prompt": "a"}], "between": [{"results": ["17"], "token_ids": [2]}]}
    with pytest.raises(AssertionError):
        peer.check_tokens(trainer, job, [[1]])
    agreeing = SimpleNamespace(_tokenize_prompts=lambda _: ([[1]],), _get_tool_suffix_ids=lambda _: [2])
    peer.check_tokens(agreeing, job, [[1]])
