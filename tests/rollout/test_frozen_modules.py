import pytest
from scripted import ScriptedEngine, make_task

from rollout.agent.modules import Memory, ModelGenerator, ModelVerifier


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
