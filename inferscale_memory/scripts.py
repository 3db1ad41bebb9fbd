"""Words in scripts that put no spaces between them: Chinese, Japanese, Thai, Lao, Khmer and Burmese. Korean has spaces,
but joins its particles to the words, so it is read in the same way.

Nothing here knows a language. A run of such characters stands for all its single characters and all its pairs: a word
of two characters or more shares at least one pair with every text that it occurs in.
"""

from __future__ import annotations

import re
from itertools import pairwise
from unicodedata import category, normalize

_UNSPACED = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f"  # Burmese
    "\u1100-\u11ff\u3130-\u318f\ua960-\ua97f\uac00-\ud7ff"  # Hangul
    "\u1780-\u17ff"  # Khmer
    "\u3005-\u3007\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # Kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)
_RUN = re.compile(f"[{_UNSPACED}]+")
_CHARACTERS_PER_WORD = 2
"""About what the words of Chinese, and the parts of Japanese and Korean ones, have."""


def split_runs(text: str) -> str:
    """`text` with every run of characters of such a script replaced by its pairs of neighbours and its characters, as
    words between spaces. A text in other scripts is returned as it is."""
    return _RUN.sub(lambda run: f" {' '.join(_pieces(run.group()))} ", text)


def unspaced(character: str) -> bool:
    """Whether a character is of such a script."""
    return _RUN.match(character) is not None


def word_count(text: str) -> int:
    """About how many words a text has."""
    characters = sum(len(run) for run in _RUN.findall(text))
    return len(_RUN.sub(" ", text).split()) + characters // _CHARACTERS_PER_WORD


def _pieces(run: str) -> list[str]:
    """Pairs first: they tell more than single characters, where only so many are looked for. Vowel signs and tone marks
    are left out, because SQLite takes them for the end of a word."""
    letters = [sign for sign in normalize("NFKC", run) if not category(sign).startswith("M")]
    return [*(one + other for one, other in pairwise(letters)), *letters]
