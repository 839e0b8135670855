from scripted import ScriptedEngine, ScriptedTokenizer, make_task

from configs.loading import load_run_config
from envs.datasets.families import PlanStep
from envs.datasets.generated import GeneratedTask
from rollout.chat import ChatFormat
from rollout.worker import Worker


async def test_a_plan_is_played_to_its_answer_if_models_verify_and_generate(tmp_path, monkeypatch):
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
