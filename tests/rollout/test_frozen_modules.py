import pytest
from scripted import ScriptedEngine, ScriptedTokenizer, make_task

from configs.loading import load_run_config
from envs.datasets.families import PlanStep
from envs.datasets.generated import GeneratedTask
from rollout.agent.agent import FrozenModule, Memory
from rollout.chat import ChatFormat
from rollout.worker import Worker


@pytest.mark.parametrize(("method", "role", "grammar"), [("verify", "verifier", True), ("answer", "generator", False)])
async def test_a_frozen_module_samples_greedily_from_the_base_model(method, role, grammar):
    engine = ScriptedEngine(["stop"])
    module = FrozenModule(engine, ChatFormat(ScriptedTokenizer()), 4)
    turn = await getattr(module, method)(make_task(), Memory(), "g/0")
    (request,) = engine.requests
    assert (turn.role, turn.trainable, turn.text) == (role, False, "stop")
    assert (request.use_adapter, request.temperature, request.max_tokens) == (False, 0.0, 4)
    assert request.grammar == ('root ::= "continue" | "stop"' if grammar else None)


async def test_a_plan_is_played_to_its_answer_if_models_verify_and_generate(tmp_path, monkeypatch):
    class IdleEngine(ScriptedEngine):
        def close(self):
            pass

    monkeypatch.setattr("rollout.worker.VllmEngine", lambda *_, **__: IdleEngine([]))
    monkeypatch.setattr("rollout.worker.build_chat", lambda _: ChatFormat(ScriptedTokenizer()))
    models = ("agent.verifier=model", "agent.generator=model", "rollout.engine.adapter_mode=native")
    settings = ('envs.actions=["think", "answer"]', "cold_start.wrong_share=0", "rollout.engine.max_model_len=10000")
    plan = [PlanStep(thought="t", action=action, action_input="42") for action in ("think", "answer")]
    worker = Worker(load_run_config(None, [*models, *settings]), tmp_path, index=0)
    [played] = await worker.demonstrate([GeneratedTask(task=make_task(), plan=tuple(plan))])
    worker.close()
    assert (played.stop_reason, played.answer) == ("answered", "42")
    assert [turn.tool_call.name for turn in played.turns] == ["think", "answer"]
