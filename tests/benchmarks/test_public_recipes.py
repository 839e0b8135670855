"""Environments that others wrote, behind the model endpoint: their tasks, their rollouts, their rewards."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scripted import ScriptedEngine, ScriptedTokenizer, text_of

from configs.loading import load_run_config
from configs.own import OwnCodeError, load_own
from envs.datasets.own import OwnSources
from envs.datasets.sampler import cold_start_tasks
from envs.datasets.split import question_key
from ray_jobs.cli import main
from ray_jobs.phases.cold_start import kept_demonstrations, scores_of
from reward.scorers import score_answer
from rollout.agent.demonstrations import load_teacher
from rollout.agent.custom import CustomAgent, build_solving, rules_of
from rollout.chat import ChatFormat
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import EngineWriter, ReplayWriter, TeacherWriter, engine_writers
from rollout.replay import as_replay, repeats

FOLDER = Path(__file__).parents[2] / "benchmarks" / "public"
pytestmark = pytest.mark.usefixtures("elsewhere")
CHAT = ChatFormat(ScriptedTokenizer())
LIBRARIES = {
    "needle_haystack": "reasoning_gym",
    "word_sequence_reversal": "reasoning_gym",
    "reverse_text": "verifiers",
    "guess_number": "verifiers",
}


def config_of(recipe):
    pytest.importorskip(LIBRARIES[recipe], exc_type=ImportError)
    return load_run_config(FOLDER / f"{recipe}.toml", [])


@pytest.fixture(params=LIBRARIES)
def config(request):
    return config_of(request.param)


def tasks_of(config, part="eval"):
    return OwnSources.of(config).tasks(next(iter(config.envs.mix)), part)


async def play(config, task, writer, max_context_tokens=20_000):
    """An attempt with a scripted tokenizer, which has an id per character."""
    endpoint = Endpoint()
    rules = replace(rules_of(config), max_tokens=200, max_context_tokens=max_context_tokens)
    agent = CustomAgent(build_solving(config.agent, None), endpoint, writer=writer, chat=CHAT, rules=rules, timeout_s=120)
    trajectory = await agent.run(task, trajectory_id="g/0", group_id="g")
    endpoint.close()
    return trajectory


async def score_of(config, task, *texts):
    trajectory = await play(config, task, engine_writers(ScriptedEngine(texts), 0.7))
    assert trajectory.failure is None
    return score_answer(task, trajectory.answer)


def test_a_recipe_is_ready_to_be_trained(config, tmp_path, capsys):
    """What `agentflow train RECIPE --dry-run` checks."""
    assert main(["train", str(FOLDER / f"{config.name}.toml"), "--dry-run", f"output_dir={tmp_path}"]) == 0


def test_held_out_tasks_are_many_and_apart_from_those_of_training_and_of_the_teacher(config):
    held_out, others = tasks_of(config), [*tasks_of(config, "train"), *tasks_of(config, "demonstrations")]
    assert len(held_out) >= config.evaluation.num_tasks == 200
    assert not {question_key(one.question) for one in held_out} & {question_key(one.question) for one in others}


async def test_all_that_its_teacher_says_is_imitated(config):
    teach, tasks = load_teacher(config.cold_start), [one.task for one in cold_start_tasks(config)[:8]]
    played = [
        await play(config, task, lambda task, own_id: TeacherWriter(teach, "teach", task, CHAT)) for task in tasks
    ]
    assert kept_demonstrations(played, scores_of(played), min_score=0.0) == (played, None)


@pytest.mark.parametrize("recipe", ["needle_haystack", "word_sequence_reversal"])
def test_a_familys_own_scorer_says_what_is_right(recipe):
    config = config_of(recipe)
    task = tasks_of(config)[0]
    assert [score_answer(task, task.answer), score_answer(task, "?")] == [1.0, 0.0]


def test_words_around_the_right_ones_cost_their_share():
    config = config_of("word_sequence_reversal")
    task = tasks_of(config)[0]
    assert score_answer(task, f"{task.answer}{'.' * len(task.answer)}") == 0.5


async def test_an_environment_of_verifiers_scores_the_reply_to_its_own_prompt():
    config = config_of("reverse_text")
    task = tasks_of(config)[0]
    word = task.question.rpartition(" ")[2]
    backwards = word[::-1]
    engine = ScriptedEngine([backwards])
    trajectory = await play(config, task, engine_writers(engine, 0.7))
    assert (trajectory.failure, trajectory.stop_reason) == (None, "answered")
    assert text_of(engine.requests[0].prompt_token_ids) == f"<s>user:{task.question}<e><s>assistant:"
    assert [turn.completion.text for turn in trajectory.turns] == [backwards]
    assert score_answer(task, trajectory.answer) == 1.0
    # Two of four letters, in one piece: 2 * 2 / (2 + 4).
    assert await score_of(config, task, backwards[:2]) == pytest.approx(2 / 3)


async def test_an_environment_with_several_turns_is_one_dialogue_that_only_grows():
    config = config_of("guess_number")
    task = tasks_of(config)[0]
    lowest, highest, number = bounds_and_number(config, task)
    wrong = lowest if number != lowest else highest
    trajectory = await play(config, task, engine_writers(ScriptedEngine([str(wrong), f" {number}"]), 0.7))
    assert (trajectory.failure, trajectory.branches) == (None, ((0, 1),))
    asked = text_of(trajectory.turns[1].prompt_token_ids)
    assert asked.endswith(f"<s>user:{'Higher.' if wrong < number else 'Lower.'}<e><s>assistant:")
    assert score_answer(task, trajectory.answer) == 1.0
    assert await score_of(config, task, *[str(wrong)] * 3) == 0.0
    assert await score_of(config, task, "none", "of", "them") == 0.0


async def test_an_episode_goes_on_from_the_middle_of_another():
    config = config_of("guess_number")
    task = tasks_of(config)[0]
    lowest, highest, number = bounds_and_number(config, task)
    wrong = str(lowest if number != lowest else highest)
    root = await play(config, task, engine_writers(ScriptedEngine([wrong] * 3), 0.7))
    engine = ScriptedEngine([str(number)])
    live = EngineWriter(engine, trajectory_id="g/8", temperature=0.7)
    end = await play(config, task, lambda task, own_id: ReplayWriter(live, root.planner_turns, 2))
    fork = as_replay(end, root.planner_turns[:2])
    assert repeats(fork, root, 2)
    assert [turn.trainable for turn in fork.turns] == [False, False, True]
    assert [text_of(one.prompt_token_ids) for one in engine.requests] == [text_of(root.turns[2].prompt_token_ids)]
    assert (score_answer(task, root.answer), score_answer(task, fork.answer)) == (0.0, 1.0)


def bounds_and_number(config, task):
    lowest, highest = (int(word.strip(".")) for word in task.question.split() if word.strip(".").isdigit())
    replies = load_own(config.agent.function, key="agent.function").__self__
    return lowest, highest, replies._rows[int(task.id.rpartition("-")[2])].task.data.number


async def test_a_rollout_that_fails_is_unscored_and_says_why():
    config = config_of("reverse_text")
    trajectory = await play(
        config, tasks_of(config)[0], engine_writers(ScriptedEngine([RuntimeError("gone")] * 9), 0.7)
    )
    assert trajectory.answer is None
    assert trajectory.stop_reason == "infrastructure"
    assert "\n" not in trajectory.failure


async def test_a_full_context_ends_an_episode_that_is_scored():
    config = config_of("reverse_text")
    trajectory = await play(config, tasks_of(config)[0], engine_writers(ScriptedEngine([]), 0.7), max_context_tokens=9)
    assert (trajectory.stop_reason, trajectory.answer, trajectory.failure) == ("context", None, None)


async def test_attempts_at_a_time_keep_their_own_keys():
    config = config_of("reverse_text")
    tasks = tasks_of(config)[:6]
    words = [task.question.rpartition(" ")[2] for task in tasks]
    scores = await asyncio.gather(
        *(score_of(config, task, word[::-1]) for task, word in zip(tasks, words, strict=True))
    )
    assert scores == [1.0] * 6


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"taskset": "no-such-taskset"}, "verifiers has no taskset 'no-such-taskset' that takes {}"),
        ({"taskset": "reverse-text", "arguments": {"colour": 3}}, "'reverse-text' that takes {'colour': 3}"),
        (
            {"taskset": "reverse-text", "environment": {"id": "user-sim"}},
            "user-sim+reverse-text has 2 agents (assistant, user); one can be trained",
        ),
        (
            {"taskset": "reverse-text", "environment": {"agent": {"harness": {"id": "bash"}}}},
            "environment.agent: the harness 'bash' runs the model's code",
        ),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(given, says):
    config_of("reverse_text")
    from rollout.agent.verifiers import VerifiersEnvironment

    with pytest.raises(OwnCodeError) as refused:
        VerifiersEnvironment(**given)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_family_or_a_setting_that_is_not_there_is_refused():
    pytest.importorskip("reasoning_gym", exc_type=ImportError)
    from envs.datasets.reasoning_gym import ReasoningGym

    with pytest.raises(OwnCodeError, match="has no family 'spelling'"):
        ReasoningGym("spelling", num_tasks=3)
    with pytest.raises(OwnCodeError, match="'spell_backward' does not take"):
        [*ReasoningGym("spell_backward", num_tasks=3, colour=3).tasks()]


@pytest.mark.parametrize(
    ("module", "library", "says"),
    [
        ("rollout.agent.verifiers", "verifiers.v1", "verifiers 0.4 is missing"),
        ("envs.datasets.reasoning_gym", "reasoning_gym", "reasoning-gym is missing .*: pip install"),
    ],
)
def test_a_library_that_is_not_installed_is_named(module, library, says, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(OwnCodeError, match=says):
        load_own(f"{module}:anything", key="envs.datasets.words.source")


def test_no_library_reached_out(elsewhere):
    assert elsewhere == []
