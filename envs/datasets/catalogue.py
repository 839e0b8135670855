"""A fictional catalogue of goods: the corpus that the offline search tool answers from."""

import random
from dataclasses import dataclass
from functools import lru_cache

from envs.datasets.split import Split, split_of

CATALOGUE_SEED = 0
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
    """One kind of goods; the weight of its crate is the fact that only a search can tell."""

    name: str
    weight_kg: int

    @property
    def passage(self) -> str:
        return f"One crate of {self.name} weighs {self.weight_kg} kg."


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All items in two halves, and a few passages that answer no question.

    No item is in both halves, so a weight learnt by heart in training is worth nothing in evaluation.
    """

    train_items: tuple[Item, ...]
    eval_items: tuple[Item, ...]
    distractors: tuple[str, ...]

    def items_of(self, split: Split) -> tuple[Item, ...]:
        return self.train_items if split == "train" else self.eval_items

    @property
    def passages(self) -> tuple[str, ...]:
        items = (*self.train_items, *self.eval_items)
        return (*(item.passage for item in items), *self.distractors)


@lru_cache(maxsize=4)
def build_catalogue(seed: int = CATALOGUE_SEED) -> Catalogue:
    """The seed decides the weights; the names and the halves are the same for every seed."""
    rng = random.Random(f"catalogue:{seed}")
    items = [
        Item(name=f"{material} {goods}", weight_kg=rng.randint(MIN_WEIGHT_KG, MAX_WEIGHT_KG))
        for material in MATERIALS.split()
        for goods in GOODS.split()
    ]
    return Catalogue(
        train_items=tuple(item for item in items if split_of(item.name) == "train"),
        eval_items=tuple(item for item in items if split_of(item.name) == "eval"),
        distractors=DISTRACTORS,
    )
