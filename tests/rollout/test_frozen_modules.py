import pytest
from scripted import ScriptedEngine, ScriptedTokenizer, make_task

from configs.loading import load_run_config
from envs.datasets.families import PlanStep
from envs.datasets.generated import GeneratedTask
from rollout.agent.agent import Memory, ModelGenerator, ModelVerifier
from rollout.chat import ChatFormat
from rollout.worker import Worker


class ScriptedChat:
    """A token for each prompt, and the texts that it was asked for."""

    def __init__(self):
        self.asked = []

    def prompt(self, system, user):
        self.asked.append((system, user))
        return (len(self.asked),)


@pytest.mark.parametrize(("said", "verdict"), [("stop", "stop"), ("continue", "continue")])
async def test_the_verifier_asks_the_frozen_model_greedily_for_one_of_two_words(said, verdict):
    engine, chat = ScriptedEngine([said]), ScriptedChat()
    found, turn = await ModelVerifier(engine, chat, 4).verify(make_task(), Memory(), "g/0")
    (request,) = engine.requests
    assert (found, turn.role, turn.trainable, turn.prompt_token_ids) == (verdict, "verifier", False, (1,))
    assert (request.use_adapter, request.temperature, request.max_tokens) == (False, 0.0, 4)
    assert request.grammar == 'root ::= "continue" | "stop"'


async def test_the_generator_writes_any_words_and_nothing_is_no_answer():
    engine, chat = ScriptedEngine([" 42 ", " "]), ScriptedChat()
    generator = ModelGenerator(engine, chat, 8)
    answers = [await generator.answer(make_task(), Memory(), "g/0") for _ in range(2)]
    assert [(answer, turn.role) for answer, turn in answers] == [("42", "generator"), (None, "generator")]
    assert [(one.use_adapter, one.grammar, one.trajectory_id) for one in engine.requests] == [(False, None, "g/0")] * 2
    assert f"Task: {make_task().question}" in chat.asked[0][1]


async def test_a_plan_is_played_to_its_answer_where_models_verify_and_generate(tmp_path, monkeypatch):
    class IdleEngine(ScriptedEngine):
        def close(self):
            pass

    monkeypatch.setattr("rollout.worker.VllmEngine", lambda *_, **__: IdleEngine([]))
    monkeypatch.setattr("rollout.worker.build_chat", lambda _: ChatFormat(ScriptedTokenizer()))
    models = ("agent.verifier.type=model", "agent.generator.type=model", "rollout.engine.adapter_mode=native")
    settings = ('envs.actions=["think", "answer"]', "cold_start.wrong_share=0", "rollout.engine.max_model_len=10000")
    plan = [PlanStep(thought="t", action=action, action_input="42") for action in ("think", "answer")]
    worker = Worker(load_run_config(None, [*models, *settings]), tmp_path, index=0)
    [played] = await worker.demonstrate([GeneratedTask(task=make_task(), plan=tuple(plan))])
    worker.close()
    assert (played.stop_reason, played.answer) == ("answered", "42")
    assert [turn.tool_call.name for turn in played.turns] == ["think", "answer"]
