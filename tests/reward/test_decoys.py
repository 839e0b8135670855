import re

from reward.prm.decoys import junk_steps, spoilt_steps
from tests.reward.test_step_text import make_step


def problem_of(task):
    return f"Problem: How many kg do {task} crates of iron bolts weigh together?\n"


def make_search(task, step):
    decision = f"Step {step + 1}\nThought: about {task}.{step}\nAction: search\nInput: item {task}.{step}\n"
    context = [f"context {number} of {task}\n" for number in range(2 * step)]
    return make_step(problem_of(task), context, decision, task=task, step=step)


def make_reply(text, task=0):
    return make_step(problem_of(task), decision=f"Step 1\nReply: {text}\n", task=task, step=0)


STEPS = [make_search(task, step) for task in range(10) for step in range(3)]


def place(step):
    return step.trajectory_id, step.task_id, step.step, step.num_steps, step.problem, step.context


def test_junk_is_in_the_context_of_a_step_and_resembles_no_right_decision():
    places = set(map(place, STEPS))
    for seed in range(50):
        junk_of_seed = junk_steps(STEPS, share=0.5, seed=seed)
        assert junk_of_seed == junk_steps(STEPS, share=0.5, seed=seed)
        assert len(junk_of_seed) == 15
        for junk in junk_of_seed:
            assert place(junk) in places
            assert junk.decision.startswith(f"Step {junk.step + 1}\n")
            assert f"about {junk.task_id.removeprefix('t')}." not in junk.decision
            assert not ("Action: search" in junk.decision and "iron bolts" in junk.decision.rpartition("Input: ")[2])


def test_junk_of_a_reply_is_a_reply():
    replies = [make_reply(f"{task} crates weigh {47 * task} kg", task) for task in range(10)]
    assert all(step.is_reply for step in junk_steps(replies, share=2.0, seed=0))


def test_a_spoilt_reply_differs_in_one_digit_even_if_it_imitates_a_decision():
    call = '<tool_call>\n{"name": "find", "arguments": {"a": 4}}\n</tool_call>\nInput: x\nReply: y'
    spoilt = spoilt_steps([make_reply(call)], share=1.0, seed=0)
    assert spoilt[0].decision != make_reply(call).decision
    assert re.sub("[0-9]", "", spoilt[0].decision) == re.sub("[0-9]", "", make_reply(call).decision)
    assert spoilt_steps([make_reply("")], share=1.0, seed=0) == []


def test_a_copy_that_differs_only_in_white_space_is_not_spoilt():
    assert spoilt_steps([make_reply("yes\nyes  yes")], share=20.0, seed=0) == []
    assert len(spoilt_steps([make_reply("yes\nno  yes")], share=20.0, seed=0)) < 20
