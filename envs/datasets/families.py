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


def result_of(code: str) -> int:
    """Return the number that the code of a plan prints. Only for code that a family wrote: it runs in this process."""
    return int(eval(code, {}, {}))


def _search_problem(goods: Sequence[Item], *, question: str, thought: str, source: str) -> Problem:
    """Return a problem that needs a search for each of the goods, then one code call."""
    answer = result_of(source)
    return Problem(
        question=question,
        answer=answer,
        plan=(
            *(PlanStep(thought="Find the weight.", action="search", action_input=item.name) for item in goods),
            PlanStep(thought=thought, action="code", action_input=source),
            PlanStep(thought="That is it.", action="answer", action_input=str(answer)),
        ),
        keys=tuple(item.name for item in goods),
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
    "What do {0} and {1} weigh together in kg?",
    "A ship loads {0} and {1}. What is the load in kg?",
    "Find the total weight in kg of {0} plus {1}.",
)
_DIFFERENCE_PHRASINGS = (
    "How many kg more do {0} weigh than {1}?",
    "By how many kg are {0} heavier than {1}?",
    "Weigh {0}, then subtract the weight of {1}. How many kg?",
)
_THREE_PHRASINGS = (
    "What do {0}, {1} and {2} weigh together in kg?",
    "A ship loads {0}, {1} and {2}. What is the load in kg?",
    "Find the total weight in kg of {0}, {1} and {2}.",
)


def _draw_loads(rng: random.Random, goods: Goods, count: int) -> list[tuple[Item, int]]:
    """Draw different items, each with a number of crates."""
    return list(zip(rng.sample(goods.items, count), rng.sample(range(11, 100), count), strict=True))


def draw_two_lookup(rng: random.Random, goods: Goods) -> Problem:
    """Draw a sum of two loads."""
    return _loads_problem(rng, _draw_loads(rng, goods, 2), _TOTAL_PHRASINGS, "+")


def draw_three_lookup(rng: random.Random, goods: Goods) -> Problem:
    """Draw a sum of three loads: three searches before one code call."""
    return _loads_problem(rng, _draw_loads(rng, goods, 3), _THREE_PHRASINGS, "+")


def draw_difference(rng: random.Random, goods: Goods) -> Problem:
    """Draw a difference of two loads, the heavier one first."""
    loads = _draw_loads(rng, goods, 2)
    loads.sort(key=lambda load: load[0].weight_kg * load[1], reverse=True)
    return _loads_problem(rng, loads, _DIFFERENCE_PHRASINGS, "-")


def _loads_problem(
    rng: random.Random, loads: Sequence[tuple[Item, int]], phrasings: Sequence[str], sign: str
) -> Problem:
    """Return a problem that is solved by a search per load and one code call."""
    return _search_problem(
        [item for item, _ in loads],
        question=rng.choice(phrasings).format(*(f"{n} crates of {item.name}" for item, n in loads)),
        thought="Add the loads." if sign == "+" else "Subtract the second load.",
        source=sign.join(f"{n}*{item.weight_kg}" for item, n in loads),
    )


FAMILIES: dict[str, Callable[[random.Random, Goods], Problem]] = {
    "lookup": draw_lookup,
    "two_lookup": draw_two_lookup,
    "difference": draw_difference,
    "three_lookup": draw_three_lookup,
    "chain": draw_chain,
}
