"""Whether a text stands in what somebody said: what decides which turns and messages go with a forgotten fact."""

from __future__ import annotations

import re

from inferscale_memory.scripts import unspaced

_WORD = re.compile(r"\w")


def says(said: str, text: str) -> bool:
    """Whether `text` stands in what was said, word for word, whatever its case, and not as a part of a longer word.

    In a script without spaces a word may end anywhere. A single character of it says too little to be looked for
    within a run of others.
    """
    text = text.strip()
    if _folded(text) not in _folded(said):  # a hundredth of what a pattern costs that is not known yet
        return False
    alone = len(text) == 1 and unspaced(text)
    for found in re.finditer(f"(?=({re.escape(text)}))", said, re.IGNORECASE):
        before, behind = (
            said[max(0, found.start() - 1) : found.start()],
            said[found.end(1) : found.end(1) + 1],
        )
        if alone:
            free = not _WORD.match(before) and not _WORD.match(behind)
        else:
            free = _ends(before, text[0]) and _ends(behind, text[-1])
        if free:
            return True
    return False


def _ends(outside: str, inside: str) -> bool:
    """Whether a word ends between two characters that stand side by side; there may be none outside."""
    return not _WORD.match(outside) or unspaced(outside) or unspaced(inside)


def _folded(text: str) -> str:
    """Two letters that `re` takes for the same are the same here."""
    return text.replace("İ", "i").replace("ı", "i").casefold()
