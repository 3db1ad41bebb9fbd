"""Where a text lies in the bytes of files, as it is or as JSON and keyword indexes spell it.

It must never show what it looks for, and needs nothing but Python: `search_files` runs this file in a process of
its own, because SQLite's locks belong to a process and go when any handle of it to the file is closed. So nothing
else may open a database's file as a file.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from subprocess import run

_SQLITE = b"SQLite format 3\0"
_ANCHOR = 4
_LONG, _PIECE = 1024, 256
_BEFORE = 64
"""A text that is split over pages is recognised by so many bytes behind the split, and up to so many before."""


def spellings(text: str) -> list[bytes]:
    """The bytes by which a text is recognised, in lower case as far as ASCII goes."""
    if (
        len(text) > _LONG
    ):  # its beginning, middle and end stand for it: what is looked for cut by cut must be short
        middle = (len(text) - _PIECE) // 2
        pieces = (text[:_PIECE], text[middle : middle + _PIECE], text[-_PIECE:])
        return list(dict.fromkeys(spelling for piece in pieces for spelling in spellings(piece)))
    forms = (text, text.lower(), text.casefold(), text.upper())
    spelled = [
        spelling for form in forms for spelling in (form, _json(form, ascii=True), _json(form, ascii=False))
    ]
    return list(dict.fromkeys(spelling.encode("utf-8", "surrogatepass").lower() for spelling in spelled))


def find(data: bytes, wanted: Iterable[bytes]) -> list[int]:
    """Offsets at which one of `spellings` begins, in any case of its letters. In an SQLite database also where it
    goes on on a page elsewhere, as the end of a long row does."""
    needles = list(wanted)
    case = _case_of(needles)
    low, found = _folded_bytes(data, case), set[int]()
    for needle in dict.fromkeys(_folded_bytes(needle, case) for needle in needles):
        found.update(_places(low, needle))
        if data.startswith(_SQLITE):
            found.update(_split_places(data, low, needle))
    return sorted(found)


def search_files(paths: Sequence[Path], wanted: Sequence[bytes]) -> list[tuple[str, int]]:
    """Path and offset of every place in the files. Files that vanish meanwhile hold nothing."""
    asked = json.dumps({"paths": [str(path) for path in paths], "wanted": [what.hex() for what in wanted]})
    # -I: whatever lies about in the working directory or the environment is not imported.
    answer = run([sys.executable, "-I", __file__], input=asked, capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(f"the files could not be read: {answer.stderr.strip().splitlines()[-1:]}")
    return [(path, offset) for path, offset in json.loads(answer.stdout)]


def _case_of(needles: Sequence[bytes]) -> dict[bytes, bytes]:
    """Letters of the needles beyond ASCII -> the same in lower case, as UTF-8 and as JSON escapes them. Only what is
    as long in both, so that offsets stay; `spellings` has the rest as far as a whole text is in one case."""
    letters = set("".join(needle.decode("utf-8", "ignore") for needle in needles))
    escaped = {code for needle in needles for code in re.findall(rb"\\u([0-9a-f]{4})", needle)}
    letters |= {chr(int(code, 16)) for code in escaped}
    case = {}
    for letter in letters:
        if letter.isascii():
            continue
        folded = letter.upper().lower()
        for form in (letter, letter.lower(), letter.upper()):
            for spell in (_utf8, _escape):
                if len(spell(form)) == len(spell(folded)):
                    case[spell(form)] = spell(folded)
    return case


def _folded_bytes(data: bytes, case: dict[bytes, bytes]) -> bytes:
    low = data.lower()
    if not case:
        return low
    return re.sub(b"|".join(map(re.escape, case)), lambda found: case[found[0]], low)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _escape(text: str) -> bytes:
    return _json(text, ascii=True).encode()


def _json(text: str, *, ascii: bool) -> str:
    return json.dumps(text, ensure_ascii=ascii)[1:-1]


def _places(low: bytes, needle: bytes) -> Iterator[int]:
    at = low.find(needle)
    while at >= 0:
        yield at
        at = low.find(needle, at + 1)


def _split_places(data: bytes, low: bytes, needle: bytes) -> Iterator[int]:
    """Where `needle` begins on one page of a database and goes on on another: most of it stands in front of the
    link to the next page, or some of it at that page's head."""
    if len(needle) < 2 * _ANCHOR:
        return
    for at in _places(low, needle[: 1 - _ANCHOR]):
        if _goes_on(data, low, at, needle):
            yield at
    heads: dict[bytes, list[int]] = {}
    for cut in range(1, len(needle) - _ANCHOR + 1):
        heads.setdefault(needle[cut : cut + _ANCHOR], []).append(cut)
    for page in range(0, len(data), _page_size(data)):
        for cut in heads.get(low[page + 4 : page + 4 + _ANCHOR], ()):
            before = needle[max(0, cut - _BEFORE) : cut]
            if _goes_on(data, low, page + 4, needle[cut:]) and _leads_to(data, low, page, before):
                yield page + 4


def _leads_to(data: bytes, low: bytes, page: int, before: bytes) -> bool:
    """Whether something that ends with `before` goes on on this page."""
    size = _page_size(data)
    link = (page // size + 1).to_bytes(4, "big")
    if before + link.lower() in low:  # a cell
        return True
    usable = size - data[20]
    overflow = (at for at in _places(data, link) if at % size == 0)
    return any(low.endswith(before, at + 4, at + usable) for at in overflow)


def _goes_on(data: bytes, low: bytes, at: int, needle: bytes) -> bool:
    """Whether `needle` stands at `at`, whatever pages it is spread over. An overflow page begins with the
    number of the next; a cell that has one ends with it."""
    size, usable = _page_size(data), _page_size(data) - data[20]
    while True:
        page = at - at % size
        room = page + usable - at
        same = _common(low[at : at + min(room, len(needle))], needle[:room])
        needle = needle[same:]
        if not needle:
            return True
        link = page if same == room else at + same
        following = int.from_bytes(data[link : link + 4], "big")
        if not same or not 2 <= following <= len(data) // size:
            return False
        at = (following - 1) * size + 4


def _common(one: bytes, other: bytes) -> int:
    """How many bytes two begin with in common. Slices are compared, for a loop over bytes would make this the longest
    part of a deletion."""
    same, differs = 0, min(len(one), len(other))
    if one[:differs] == other[:differs]:
        return differs
    while differs - same > 1:
        middle = (same + differs) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            differs = middle
    return same


def _page_size(data: bytes) -> int:
    size = int.from_bytes(data[16:18], "big")
    return 65536 if size <= 1 else size


def _main() -> None:
    asked = json.loads(sys.stdin.read())
    wanted = [bytes.fromhex(what) for what in asked["wanted"]]
    found = []
    for path in asked["paths"]:
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError:
            continue
        found += [(path, offset) for offset in find(data, wanted)]
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
