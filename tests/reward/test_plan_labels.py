import pytest

from envs.datasets.families import build_catalogue
from envs.datasets.generated import generate, result_of
from reward.labels import LabelError
from reward.labels.plan import PlanLabeller, plan_scores
from reward.prm.step_text import step_texts
from tests.changed import replace
from tests.reward.test_step_text import decided, make_trajectory, malformed

FAMILIES = ("lookup", "two_lookup", "three_lookup", "chain", "arith", "branch")


def passage_of(item):
    goods = build_catalogue().train
    [found] = [one.passage for one in (*goods.items, *goods.links) if one.name == item]
    return found


def play(plan):
    """The turns of a plan, with what the tools answer to it."""
    names = {}
    for step in plan:
        match step.action:
            case "search":
                yield decided("search", step.action_input, passage_of(step.action_input), thought=step.thought)
            case "code":
                yield decided("code", step.action_input, str(result_of(step.action_input, names)))
            case _:
                yield decided(step.action, step.action_input, step.action_input)


def solve(family, index):
    generated = generate(family, split="train", index=index, seed=3)
    return generated.task, list(play(generated.plan))


def find(family, accept):
    """The first task of a family whose plan is accepted."""
    return next(
        one
        for one in (generate(family, split="train", index=index, seed=0) for index in range(500))
        if accept([step.action_input for step in one.plan])
    )


def scores(task, *turns):
    return plan_scores(make_trajectory(*turns, task=task))


# Right steps.


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_the_plan_itself_is_right(family):
    for index in range(30):
        task, turns = solve(family, index)
        assert scores(task, *turns) == [1.0] * len(turns), task.question


def test_a_plan_says_nothing_of_an_agent_of_ones_own():
    task, turns = solve("lookup", 0)
    with pytest.raises(LabelError):
        scores(task, replace(turns[0], heard="user: hello"))


def test_searches_may_come_in_any_order():
    task, (first, second, code, answer) = solve("two_lookup", 0)
    assert scores(task, second, first, code, answer) == [1.0] * 4


def test_a_search_is_judged_by_what_it_found_not_by_its_words():
    task, (search, *_) = solve("lookup", 0)
    item = search.tool_call.arguments
    assert scores(task, decided("search", f"how heavy is one crate of {item}", passage_of(item))) == [1.0]


# Wrong ones.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_guess_is_wrong(family):
    task, _ = solve(family, 1)
    assert scores(task, decided("answer", str(int(task.answer) + 10))) == [0.0]


def test_searching_an_item_that_nobody_asked_for_is_wrong():
    task, (search, *_) = solve("lookup", 4)
    others = [one for one in build_catalogue().train.items if one.name != search.tool_call.arguments]
    assert scores(task, *(decided("search", one.name, one.passage) for one in others[:3])) == [0.0] * 3


@pytest.mark.parametrize("result", ["", "SyntaxError: invalid syntax", "3.5", "hello", "1" * 5000])
def test_code_that_prints_no_integer_is_wrong(result):
    task, _ = solve("arith", 0)
    assert scores(task, decided("code", "1/0", result, error="runtime")) == [0.0]


def test_a_malformed_step_is_wrong_and_the_next_is_judged_as_if_it_had_not_been():
    task, turns = solve("lookup", 5)
    assert scores(task, malformed("hm"), *turns) == [0.0, 1.0, 1.0, 1.0]


# Steps between right and wrong.


def test_a_thought_is_harmless():
    task, turns = solve("branch", 0)
    assert scores(task, decided("think", "x must be even", "Noted."), *turns) == [0.2, 1.0, 1.0, 1.0]


def test_a_step_that_was_done_before_is_nearly_worthless():
    task, (search, code, answer) = solve("lookup", 6)
    assert scores(task, search, search, code, code, answer) == [1.0, 0.1, 1.0, 0.1, 1.0]


def test_one_of_two_products_is_a_part_of_the_step_and_worth_little():
    generated = find("two_lookup", lambda inputs: "+" in inputs[2])
    first, second, code, answer = play(generated.plan)
    left, right = generated.plan[2].action_input.split("+")
    parts = [decided("code", part, str(result_of(part, {}))) for part in (left, right)]
    assert scores(generated.task, first, second, *parts, code, answer) == [1.0, 1.0, 0.2, 0.2, 1.0, 1.0]
    assert scores(generated.task, first, second, parts[0], parts[0]) == [1.0, 1.0, 0.2, 0.1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_answer_that_no_step_supports_is_good_but_not_right(family):
    task, (*_, answer) = solve(family, 7)
    assert scores(task, answer) == [0.7]


def test_code_that_only_now_has_its_variable_is_the_right_step():
    task, (first, second, answer) = solve("branch", 8)
    too_early = decided("code", second.tool_call.arguments, "NameError: name 'x' is not defined", error="name")
    assert scores(task, too_early, first, second, answer) == [0.0, 1.0, 1.0, 1.0]


# Labels.


async def test_a_label_says_the_same_with_and_without_hindsight():
    task, turns = solve("lookup", 0)
    trajectory = make_trajectory(*turns[:1], decided("think", "hm", "Noted."), *turns[1:], task=task)
    labeller = PlanLabeller([trajectory])
    steps = step_texts(trajectory)
    labels = [await labeller.label(step) for step in reversed(steps)][::-1]
    assert [one.score for one in labels] == [1.0, 0.2, 1.0, 1.0]
    assert [one.score_hindsight for one in labels] == [one.score for one in labels]
    assert [one.votes for one in labels] == [(1.0,), (0.2,), (1.0,), (1.0,)]
    assert [(one.step, one.text_digest, one.labeller) for one in labels] == [
        (step.step, step.digest, "plan") for step in steps
    ]
    assert {(one.trajectory_id, one.task_id) for one in labels} == {("g1/0", task.id)}
