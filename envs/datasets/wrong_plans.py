"""Wrong plans: demonstrations that fail the way a careless planner fails, and the arithmetic that finds them."""

import ast
import operator
import random
import re
from collections.abc import Callable, Iterator

from envs.datasets.families import PlanStep

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def result_of(code: str, names: dict[str, int]) -> int:
    """What the code of a plan prints; assignments are left in `names`, as the sandbox keeps them."""
    value = 0
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            names[statement.targets[0].id] = _value(statement.value, names)
        elif isinstance(statement, ast.Expr):
            value = _value(statement.value, names)
    return value


def partial_results(code: str, names: dict[str, int]) -> set[int]:
    """The values of the operations inside the code's expressions, the whole of an expression left out."""
    return {
        _value(inner, dict(names))
        for statement in ast.parse(code).body
        if isinstance(statement, ast.Assign | ast.Expr)
        for inner in _operations(statement.value)
        if inner is not statement.value
    }


def _operations(node: ast.expr) -> Iterator[ast.BinOp]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.BinOp))


def _value(node: ast.expr, names: dict[str, int]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return names[name]
        case ast.BinOp(left=left, op=symbol, right=right):
            return _OPERATORS[type(symbol)](_value(left, names), _value(right, names))
    raise ValueError(f"not the arithmetic of a plan: {ast.dump(node)}")


Plan = tuple[PlanStep, ...]

GUESS_SHARE = 0.85
FORGOTTEN_SHARE = 0.9
"""Of the wrong plans for a difference between two loads these leave out a search, but subtract. Without them hardly any
demonstration subtracts, and RL, which cannot reward what is never tried, learns to add the loads."""


def wrong_steps(plan: Plan, rng: random.Random) -> Plan:
    """A guess mostly (for a difference a search left out), else one of the wrong turns that fit the plan. The answer
    follows from the steps, and is wrong. Guesses prevail so that using the tools at all is something that is left to
    learn."""
    wrong = _careless(plan, rng)
    # A changed expression can come out right by chance; a guess never does.
    return wrong if wrong[-1].action_input != plan[-1].action_input else _guess(plan, rng)


def _careless(plan: Plan, rng: random.Random) -> Plan:
    searches = any(step.action == "search" for step in plan)
    if searches and "-" in plan[-2].action_input and rng.random() < FORGOTTEN_SHARE:
        return _forget_search(plan, rng)
    if rng.random() < GUESS_SHARE:
        return _guess(plan, rng)
    turns = [_wrong_operator, _stop_early]
    if searches:
        turns.append(_forget_search)
    return rng.choice(turns)(plan, rng)


def _guess(plan: Plan, rng: random.Random) -> Plan:
    gold = int(plan[-1].action_input)
    error = rng.choice((-1, 1)) * rng.randint(1, 9) * rng.choice((1, 10, 100))
    return (_answer("I guess.", gold + error),)


def _wrong_operator(plan: Plan, rng: random.Random) -> Plan:
    code = plan[-2].action_input
    position = rng.choice([index for index, character in enumerate(code) if character in "+-*"])
    other = rng.choice([symbol for symbol in "+-*" if symbol != code[position]])
    changed = code[:position] + other + code[position + 1 :]
    return _with_code(plan[:-2], changed, thought=plan[-2].thought)


def _forget_search(plan: Plan, rng: random.Random) -> Plan:
    """Leaves out the last search and takes a number out of thin air: weights follow the `*`."""
    searches = [step for step in plan if step.action == "search"]
    head, _, weight = plan[-2].action_input.rpartition("*")
    guessed = rng.choice([number for number in range(11, 100) if number != int(weight)])
    return _with_code(tuple(searches[:-1]), f"{head}*{guessed}", thought="I know the weight.")


def _stop_early(plan: Plan, rng: random.Random) -> Plan:
    """Takes an intermediate result for the answer: what all the searches found, or the load of the first item."""
    code = plan[-2].action_input
    if "x" in code:
        return (*plan[:1], _answer("That is it.", result_of(plan[0].action_input, {})))
    part = re.search(r"\d+[-+*]\d+", code)
    if part is None or part.group() == code:
        return (*plan[:-2], _answer("That is it.", int(code.rpartition("*")[2])))
    return _with_code(plan[:1] if len(plan) > 2 else (), part.group(), thought="This is enough.")


def _with_code(done: Plan, code: str, *, thought: str) -> Plan:
    names: dict[str, int] = {}
    for step in done:
        if step.action == "code":
            result_of(step.action_input, names)
    call = PlanStep(thought=thought, action="code", action_input=code)
    return (*done, call, _answer("That is it.", result_of(code, names)))


def _answer(thought: str, value: int) -> PlanStep:
    return PlanStep(thought=thought, action="answer", action_input=str(value))
