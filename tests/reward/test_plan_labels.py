import pytest

from envs.datasets.families import build_catalogue, result_of
from envs.datasets.generated import generate
from reward.labels import LabelError
from reward.labels.plan import PlanLabeller, plan_scores
from reward.prm.step_text import step_texts
from tests.changed import replace
from tests.reward.test_step_text import decided, make_trajectory, malformed

FAMILIES = ("lookup", "two_lookup", "difference", "three_lookup", "chain")


def passage_of(item):
    goods = build_catalogue()["train"]
    [found] = [one.passage for one in (*goods.items, *goods.links) if one.name == item]
    return found


def play(plan):
    """Yield the turns of a plan with the results of the tools."""
    for step in plan:
        match step.action:
            case "search":
                yield decided("search", step.action_input, passage_of(step.action_input), thought=step.thought)
            case "code":
                yield decided("code", step.action_input, str(result_of(step.action_input)))
            case _:
                yield decided(step.action, step.action_input, step.action_input)


def solve(family, index):
    generated = generate(family, split="train", index=index, seed=3)
    return generated.task, list(play(generated.plan))


def scores(task, *turns):
    return plan_scores(task, make_trajectory(*turns, task=task).planner_turns)


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_is_right_guess_is_wrong_and_unsupported_answer_is_between(family):
    for index in range(30):
        task, turns = solve(family, index)
        assert scores(task, *turns) == [1.0] * len(turns), task.question
        assert scores(task, decided("answer", str(int(task.answer) + 10))) == [0.0]
        assert scores(task, turns[-1]) == [0.7]


def test_custom_agents_have_no_plan():
    task, turns = solve("lookup", 0)
    with pytest.raises(LabelError):
        scores(task, replace(turns[0], heard="user: hello"))


def test_a_search_is_scored_by_its_result_in_any_order():
    task, (first, second, code, answer) = solve("two_lookup", 0)
    assert scores(task, second, first, code, answer) == [1.0] * 4
    item = first.tool_call.arguments
    assert scores(task, decided("search", f"how heavy is one crate of {item}", passage_of(item))) == [1.0]
    needed = (first.tool_call.arguments, second.tool_call.arguments)
    others = [other for other in build_catalogue()["train"].items if other.name not in needed]
    assert scores(task, *(decided("search", other.name, other.passage) for other in others[:3])) == [0.0] * 3


@pytest.mark.parametrize("result", ["", "SyntaxError: invalid syntax", "3.5", "hello", "1" * 5000])
def test_code_without_an_integer_is_wrong(result):
    task, _ = solve("lookup", 0)
    assert scores(task, decided("code", "1/0", result, error="runtime")) == [0.0]


def test_malformed_thought_and_repeated_steps():
    task, (search, code, answer) = solve("lookup", 6)
    thought = decided("think", "hm", "Noted.")
    turns = malformed("hm"), thought, thought, search, search, code, code, answer
    assert scores(task, *turns) == [0.0, 0.2, 0.1, 1.0, 0.1, 1.0, 0.1, 1.0]


def test_one_of_two_products_is_a_part_of_the_step():
    generated = generate("two_lookup", split="train", index=0, seed=0)
    first, second, code, answer = play(generated.plan)
    left, right = generated.plan[2].action_input.split("+")
    parts = [decided("code", part, str(result_of(part))) for part in (left, right)]
    assert scores(generated.task, first, second, *parts, code, answer) == [1.0, 1.0, 0.2, 0.2, 1.0, 1.0]
    assert scores(generated.task, first, second, parts[0], parts[0]) == [1.0, 1.0, 0.2, 0.1]


async def test_a_label_is_bound_to_the_text_of_its_step():
    task, turns = solve("lookup", 0)
    trajectory = make_trajectory(*turns[:1], decided("think", "hm", "Noted."), *turns[1:], task=task)
    labeller = PlanLabeller([trajectory])
    steps = step_texts(trajectory)
    labels = [await labeller.label(step) for step in reversed(steps)][::-1]
    assert [(label.score, label.votes) for label in labels] == [(score, (score,)) for score in (1.0, 0.2, 1.0, 1.0)]
    for label, step in zip(labels, steps, strict=True):
        assert (label.step, label.text_digest, label.labeller) == (step.step, step.digest, "plan")
        assert (label.trajectory_id, label.task_id) == ("g1/0", task.id)
