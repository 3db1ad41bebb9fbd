"""Whether a fact that a model wrote down was said, or was copied out of its instructions.

A model that is hardly able to extract repeats the example that it was given. Only that is looked for: what a capable
model concludes, translates or words differently passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_WORD = re.compile(r"\d+(?:[-./:,]\d+)*|[^\W\d_]+")
_LEAST_COPIED = 2
"""Words of its instructions alone that a fact has to consist of. One may be the translation of a word that was said."""
_EMPTY = frozenset(
    _WORD.findall(
        "a an and are as at be been by did do for from had has have he her hers him his i in into is it its me my not "
        "of on or our she so that the their them they this to us user users was we were what when which who will with "
        "you your assistant"
    )
)
"""Words that say nothing about where a fact comes from."""


def copied(fact: str, *, said: str, instructions: str, names: Iterable[str]) -> bool:
    """Whether `fact` comes out of the instructions rather than out of what was said.

    Args:
        fact: the text that the model wrote.
        said: the messages, and everything that the model was shown beside them.
        instructions: what the model was told to do, with their example.
        names: names and numbers of that example. One of them in a fact is enough, unless it was said.
    """
    words, heard = _words(fact), _words(said)
    if words & _words(" ".join(names)) - heard:
        return True
    telling = words - _EMPTY
    return len(telling) >= _LEAST_COPIED and not telling & heard and telling <= _words(instructions)


def _words(text: str) -> set[str]:
    """Words and numbers; a date is one number."""
    return {word.casefold() for word in _WORD.findall(text)}
