"""Families of generated problems: each draws a question together with the tool calls that solve it.

Search questions are about a fictional catalogue of goods, the corpus of the offline search tool.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product

from envs.datasets.rows import SPLITS, Split, split_of

MIN_WEIGHT_KG = 11
MAX_WEIGHT_KG = 99

MATERIALS = (
    "copper cedar iron steel brass wool silk cotton paper glass stone clay wooden plastic rubber silver "
    "golden bronze tin oak pine maple amber velvet leather linen marble granite ceramic bamboo ivory walnut"
)
GOODS = (
    "bolts planks chairs lamps cups bowls plates rings bells wheels pipes frames tiles gears ropes nails "
    "screws hooks keys locks doors tables drums masks toys coins pins buttons belts trays beads panels"
)

LINK_MATERIALS = "jade coral pearl crystal ebony cork zinc nickel"

DISTRACTORS = (
    "The catalogue lists crates only; single goods are never sold.",
    "Every crate is closed with a red seal before it leaves the store.",
    "The store opens at 7 in the morning and closes at 18 in the evening.",
    "Iron and steel goods are kept dry in hall 12.",
    "Goods made of glass or ceramic travel on the upper deck.",
    "Wheels, pipes and planks are measured in cm, not in kg.",
    "A lorry of the store carries 40 tonnes at most.",
    "Coins and keys in this catalogue are toys without any value.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One kind of goods. Only a search can find the weight of its crate."""

    name: str
    weight_kg: int
    same_as: "Item | None" = None
    """The goods that a link's passage names instead of a weight, to be searched next."""

    @property
    def passage(self) -> str:
        weight = f"as much as one crate of {self.same_as.name}" if self.same_as else f"{self.weight_kg} kg"
        return f"One crate of {self.name} weighs {weight}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Goods:
    """One half of the catalogue. Its links lead to its items."""

    items: tuple[Item, ...]
    links: tuple[Item, ...]


@cache
def build_catalogue() -> dict[Split, Goods]:
    """Return the catalogue in two disjoint halves: a weight memorized in training does not help in evaluation."""
    rng = random.Random("catalogue:0")
    names = map(" ".join, product(MATERIALS.split(), GOODS.split()))
    items = [Item(name=name, weight_kg=rng.randint(MIN_WEIGHT_KG, MAX_WEIGHT_KG)) for name in names]
    return {split: _half(items, split, rng) for split in SPLITS}


def catalogue_passages() -> list[str]:
    """Return all passages of the catalogue; DISTRACTORS answer no question."""
    halves = build_catalogue().values()
    items = chain(*(half.items for half in halves), *(half.links for half in halves))
    return [*(item.passage for item in items), *DISTRACTORS]


def _half(items: Sequence[Item], split: Split, rng: random.Random) -> Goods:
    # A link leads to the same goods of another material, so that no passage has both words of another link's name.
    kept = tuple(item for item in items if split_of(item.name) == split)
    links = []
    for goods, material in product(GOODS.split(), LINK_MATERIALS.split()):
        if split_of(f"{material} {goods}") == split:
            item = rng.choice([item for item in kept if item.name.endswith(f" {goods}")])
            links.append(Item(name=f"{material} {goods}", weight_kg=item.weight_kg, same_as=item))
    return Goods(items=kept, links=tuple(links))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """One decision of a planner: a thought, a tool and its input."""

    thought: str
    action: str
    action_input: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A drawn problem."""

    question: str
    answer: int
    plan: tuple[PlanStep, ...]
    keys: tuple[str, ...]
    """All keys of a problem hash to its split. They identify the computation, with commuting operands in one order, and
    not its wording."""


def _code(thought: str, source: str) -> PlanStep:
    return PlanStep(thought=thought, action="code", action_input=source)


def _answer(value: int) -> PlanStep:
    return PlanStep(thought="That is it.", action="answer", action_input=str(value))


def result_of(code: str, names: dict[str, int] | None = None) -> int:
    """Return the number that the code of a plan prints; assignments stay in `names`, as in the sandbox.

    Only for code that a family wrote: it runs in this process.
    """
    names = {} if names is None else names
    assignment, _, expression = code.rpartition(";")
    exec(assignment, {}, names)
    return int(eval(expression, {}, names))


def _search_problem(goods: Sequence[Item], *, question: str, thought: str, source: str) -> Problem:
    """Return a problem that needs a search for each of the goods, then one code call."""
    answer = result_of(source)
    return Problem(
        question=question,
        answer=answer,
        plan=(
            *(PlanStep(thought="Find the weight.", action="search", action_input=item.name) for item in goods),
            _code(thought, source),
            _answer(answer),
        ),
        keys=tuple(item.name for item in goods),
    )


_ARITH_PHRASINGS = {
    "{a}*{b}+{c}": (
        "A truck carries {a} boxes of {b} apples and {c} loose apples. How many apples is that?",
        "Each of {a} pupils has {b} coins and the teacher has {c}. How many coins are there in all?",
        "A hall has {a} rows of {b} seats and a balcony of {c} seats. How many seats are there?",
    ),
    "{a}*{b}-{c}": (
        "A baker makes {a} trays of {b} rolls and burns {c} rolls. How many rolls are good?",
        "A shop buys {a} bags of {b} nuts and sells {c} nuts. How many nuts are left?",
        "A park has {a} rows of {b} trees. A storm fells {c} of them. How many trees still stand?",
    ),
    "({a}+{b})*{c}": (
        "A mason lays {a} bricks every morning and {b} every evening. How many bricks in {c} days?",
        "A ticket costs {a} coins and a meal {b} coins. How many coins do {c} guests pay for both?",
        "Every basket holds {a} red and {b} green pears. How many pears are in {c} baskets?",
    ),
    "({a}-{b})*{c}": (
        "A pump adds {a} litres an hour but {b} leak out. How many litres are gained in {c} hours?",
        "A clerk earns {a} coins a day and spends {b}. How many coins are saved in {c} days?",
        "Each of {c} teams had {a} players and lost {b}. How many players are left in all?",
    ),
}


def draw_arith(rng: random.Random, goods: Goods) -> Problem:
    """Draw two operations on two-digit numbers, for one code call."""
    shape = rng.choice(list(_ARITH_PHRASINGS))
    low, high, c = *sorted(rng.sample(range(11, 100), 2)), rng.randint(11, 99)
    # The key has sorted operands; a subtraction needs the larger one first to stay positive.
    first_is_larger = shape.startswith("({a}-") or rng.random() < 0.5
    a, b = (high, low) if first_is_larger else (low, high)
    code = shape.format(a=a, b=b, c=c)
    answer = result_of(code)
    return Problem(
        question=rng.choice(_ARITH_PHRASINGS[shape]).format(a=a, b=b, c=c),
        answer=answer,
        plan=(_code("Compute it.", code), _answer(answer)),
        keys=(shape.format(a=low, b=high, c=c),),
    )


_LOOKUP_PHRASINGS = (
    "How many kg do {n} crates of {name} weigh?",
    "A truck carries {n} crates of {name}. What is the load in kg?",
    "A shop orders {n} crates of {name}. How heavy is the order in kg?",
    "Find the total weight in kg of {n} crates of {name}.",
)


def draw_lookup(rng: random.Random, goods: Goods) -> Problem:
    """Draw a load: the weight of one item must be found before it is multiplied."""
    return _load_problem(rng, [rng.choice(goods.items)])


def draw_chain(rng: random.Random, goods: Goods) -> Problem:
    """Draw a lookup whose first search is the only way to learn the goods of the second."""
    link = rng.choice(goods.links)
    return _load_problem(rng, [link, link.same_as or link])


def _load_problem(rng: random.Random, found: Sequence[Item]) -> Problem:
    """Draw the load of a number of crates of the first of the goods, which weigh as much as the last."""
    n = rng.randint(11, 99)
    question = rng.choice(_LOOKUP_PHRASINGS).format(n=n, name=found[0].name)
    return _search_problem(found, question=question, thought="Multiply both.", source=f"{n}*{found[-1].weight_kg}")


_TOTAL_PHRASINGS = (
    "What do {n} crates of {name} and {m} crates of {other} weigh together in kg?",
    "A ship loads {n} crates of {name} and {m} crates of {other}. What is the load in kg?",
    "Find the total weight in kg of {n} crates of {name} plus {m} crates of {other}.",
)
_DIFFERENCE_PHRASINGS = (
    "How many kg more do {n} crates of {name} weigh than {m} crates of {other}?",
    "By how many kg are {n} crates of {name} heavier than {m} crates of {other}?",
    "Weigh {n} crates of {name}, then subtract the weight of {m} crates of {other}. How many kg?",
)


def _draw_loads(rng: random.Random, goods: Goods, count: int) -> list[tuple[Item, int]]:
    """Draw different items, each with a number of crates."""
    return list(zip(rng.sample(goods.items, count), rng.sample(range(11, 100), count), strict=True))


def draw_two_lookup(rng: random.Random, goods: Goods) -> Problem:
    """Draw a sum of two loads."""
    (item, n), (other, m) = loads = _draw_loads(rng, goods, 2)
    question = rng.choice(_TOTAL_PHRASINGS).format(n=n, name=item.name, m=m, other=other.name)
    return _loads_problem(loads, question, "+")


def draw_difference(rng: random.Random, goods: Goods) -> Problem:
    """Draw a difference of two loads, the heavier one first."""
    loads = _draw_loads(rng, goods, 2)
    loads.sort(key=lambda load: load[0].weight_kg * load[1], reverse=True)
    (item, n), (other, m) = loads
    question = rng.choice(_DIFFERENCE_PHRASINGS).format(n=n, name=item.name, m=m, other=other.name)
    return _loads_problem(loads, question, "-")


def _loads_problem(loads: Sequence[tuple[Item, int]], question: str, sign: str) -> Problem:
    """Return a problem that is solved by a search per load and one code call."""
    return _search_problem(
        [item for item, _ in loads],
        question=question,
        thought="Add the loads." if sign == "+" else "Subtract the second load.",
        source=sign.join(f"{n}*{item.weight_kg}" for item, n in loads),
    )


_THREE_PHRASINGS = (
    "What do {0}, {1} and {2} weigh together in kg?",
    "A ship loads {0}, {1} and {2}. What is the load in kg?",
    "Find the total weight in kg of {0}, {1} and {2}.",
)


def draw_three_lookup(rng: random.Random, goods: Goods) -> Problem:
    """Draw a sum of three loads: three searches before one code call."""
    loads = _draw_loads(rng, goods, 3)
    question = rng.choice(_THREE_PHRASINGS).format(*(f"{n} crates of {item.name}" for item, n in loads))
    return _loads_problem(loads, question, "+")


_BRANCH_PHRASINGS = (
    "Let x = {a} * {b}. If x is {condition}, give {then}, otherwise give {other}.",
    "Multiply {a} by {b} to get x. Is x {condition}? Then give {then}. If not, give {other}.",
    "x is the product of {a} and {b}. Report {then} when x is {condition}, else {other}.",
)


def draw_branch(rng: random.Random, goods: Goods) -> Problem:
    """Draw two code calls: the result of the first decides the second, which uses its variable x."""
    # A product of two free factors is odd only once in four times; drawing the parity first balances both.
    start = rng.choice((11, 12))
    a, b = rng.randrange(start, 100, 2), rng.randrange(11, 100, 2)
    x = a * b
    condition = rng.choice(("even", "odd", "above", "below"))
    met = (x % 2 == 0) == (condition == "even")
    if condition in ("above", "below"):
        # So close to x that the product must be computed.
        bound = x + rng.choice((-1, 1)) * rng.randint(10, 100)
        condition, met = f"{condition} {bound}", (x > bound) == (condition == "above")
    plus, factor = rng.randint(11, 99), rng.randint(3, 9)
    then, other = rng.sample([f"x + {plus}", f"x - {plus}", f"x * {factor}"], 2)
    taken = then if met else other
    answer = result_of(taken, {"x": x})
    return Problem(
        question=rng.choice(_BRANCH_PHRASINGS).format(a=a, b=b, condition=condition, then=then, other=other),
        answer=answer,
        plan=(
            _code("Compute x first.", f"x = {a}*{b}; x"),
            _code(f"x is {'' if met else 'not '}{condition}.", taken),
            _answer(answer),
        ),
        keys=(f"{min(a, b)}*{max(a, b)} {condition} {then} {other}",),
    )


FAMILIES: dict[str, Callable[[random.Random, Goods], Problem]] = {
    "arith": draw_arith,
    "lookup": draw_lookup,
    "two_lookup": draw_two_lookup,
    "difference": draw_difference,
    "three_lookup": draw_three_lookup,
    "chain": draw_chain,
    "branch": draw_branch,
}
