"""The sentences a verification is made of: plain, dated, distinct, and the same for the same seed.

Sentences and not random ids: they are what is remembered, they never spell a control token, and a model
answers about them with a distribution in which a wrong memory shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from inferscale_memory.prompt import fact_line

Ids = tuple[int, ...]

_PEOPLE = ("Ada", "Bruno", "Chen", "Dina", "Emil", "Fatou", "Goran", "Hana")
_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "grey")
_THINGS = ("bicycle", "umbrella", "guitar", "suitcase", "kettle", "ladder", "telescope", "sewing machine")
_PLACES = ("in the cellar", "at the station", "on the balcony", "under the stairs", "in the garage")


@dataclass(frozen=True, slots=True)
class Material:
    """Token ids of everything said. `strangers` are facts too, of which no question asks."""

    preamble: Ids
    facts: tuple[Ids, ...]
    strangers: tuple[Ids, ...]
    question: Ids

    @classmethod
    def write(cls, tokenizer: Any, facts: int, seed: int) -> Material:
        chance = random.Random(seed)
        lines = [_line(chance, number) for number in chance.sample(range(100, 1000 + 2 * facts), 2 * facts)]
        start = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
        asked = lines[0].partition("the ")[2].partition(" is ")[0]
        return cls(
            preamble=start
            + _ids(tokenizer, "You are a helpful assistant. You remember the following from earlier:\n"),
            facts=tuple(_ids(tokenizer, line) for line in lines[:facts]),
            strangers=tuple(_ids(tokenizer, line) for line in lines[facts:]),
            question=_ids(tokenizer, f"\nQuestion: Where is the {asked}, and behind which door?\nAnswer:"),
        )


def _line(chance: random.Random, number: int) -> str:
    thing = f"{chance.choice(_COLOURS)} {chance.choice(_THINGS)}"
    return fact_line(
        f"the {thing} is {chance.choice(_PLACES)}, behind door {number}.",
        when=datetime(2026, 1, 1) + timedelta(days=chance.randrange(365)),
        speaker=chance.choice(_PEOPLE),
    )


def _ids(tokenizer: Any, text: str) -> Ids:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
