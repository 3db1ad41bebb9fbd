"""Regular expressions over a string, as regular expressions over the JSON that spells it.

A JSON schema's `pattern` is about the value of a string; the grammar of an engine is about its spelling, in which
quotes, backslashes and control characters are escapes. Engines take the one for the other, and then let through what
is no JSON. `spelled` translates: whatever its result matches is JSON, and the value it spells matches the pattern.

The syntax is that of ECMA-262 without what a grammar cannot hold: lookaround, back references, word boundaries,
anchors inside, and Unicode properties. A pattern is kept as a whole match, also where it is not anchored: what
matches as a whole matches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]
"""Code points, as inclusive ranges in order."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_MOST_REPEATS = 100_000

_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = (
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
)
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00}
_SYNTAX = frozenset(r"^$\.*+?()[]{}|/-")
_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_NEEDS_ESCAPE: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))

_AS_EBNF = chr(_LAST) + "{0}"
"""Matches nothing. xgrammar has two ways with a pattern, and the one for patterns in ASCII knows no escapes; a
character beyond ASCII makes it take the other."""


class UnsupportedPatternError(ValueError):
    """What a grammar cannot hold, for a sentence about the pattern."""


def spelled(pattern: str) -> str:
    """The pattern of the JSON between the quotes, anchored at both ends.

    A character that JSON escapes is left out where it is one of many and their number is bounded, as in
    `[^a]{0,80}`: grammars count classes of characters fast, and escapes slowly.

    Raises:
        UnsupportedPatternError: the pattern is malformed, or has a part that cannot be kept.
    """
    tree = _Parser(pattern).read()
    text = tree.spelled()
    if "\\\\" in text:
        text = _AS_EBNF + text
    return f"^{text}$"


# -- sets of characters --------------------------------------------------------------------------------------


def _union(parts: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(parts):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def _without(ranges: Ranges, removed: Ranges) -> Ranges:
    kept = []
    for low, high in ranges:
        for begin, end in removed:
            if end < low or begin > high:
                continue
            if begin > low:
                kept.append((low, begin - 1))
            low = end + 1
        if low <= high:
            kept.append((low, high))
    return tuple(kept)


def _but(ranges: Ranges) -> Ranges:
    return _without(((0, _LAST),), ranges)


@dataclass(frozen=True, slots=True)
class _Chars:
    """One character of a set."""

    ranges: Ranges

    def spelled(self, *, counted: bool = False) -> str:
        plain = _class(_without(self.ranges, _union((*_NEEDS_ESCAPE, _SURROGATES))))
        escaped = _escapes(self.ranges) if not (counted and plain) else []
        parts = [part for part in (plain, *escaped) if part]
        if not parts:
            raise UnsupportedPatternError("it has a set of characters with nothing in it")
        return parts[0] if len(parts) == 1 and not escaped else f"(?:{'|'.join(parts)})"


def _class(ranges: Ranges) -> str:
    if not ranges:
        return ""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _literal(ranges[0][0])
    return "[" + "".join(_literal(a) if a == b else f"{_literal(a)}-{_literal(b)}" for a, b in ranges) + "]"


def _literal(code: int) -> str:
    character = chr(code)
    return f"\\{character}" if character in _SYNTAX else character


def _escapes(ranges: Ranges) -> list[str]:
    codes = [code for low, high in _NEEDS_ESCAPE for code in range(low, high + 1)]
    found = [code for code in codes if any(low <= code <= high for low, high in ranges)]
    short = [_SHORT[code] for code in found if code in _SHORT]
    long = [f"{code:04x}" for code in found if code not in _SHORT]
    parts = [f"\\\\{_literal(ord(text))}" for text in short]
    return parts + [f"\\\\u{text}" for text in long]


_ASCII: Ranges = ((0x00, 0x7F),)
_CLASSES = {
    "d": _DIGITS,
    "w": _WORD,
    "s": _SPACE,
    "D": _without(_ASCII, _DIGITS),
    "W": _without(_ASCII, _WORD),
    "S": _but(_union((*_SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)))),
}
"""What the dialects of regular expressions agree on: some count letters and digits of all scripts, and some have more
kinds of white space."""


# -- the tree ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]

    def spelled(self) -> str:
        return "".join(part.spelled() for part in self.parts)


@dataclass(frozen=True, slots=True)
class _Choice:
    parts: tuple[_Node, ...]

    def spelled(self) -> str:
        return f"(?:{'|'.join(part.spelled() for part in self.parts)})"


@dataclass(frozen=True, slots=True)
class _Repeat:
    """`part`, `least` to `most` times; None for no bound."""

    part: _Node
    least: int
    most: int | None

    def spelled(self) -> str:
        if self.most == 0:
            return ""
        if isinstance(self.part, _Chars):
            free = self.part.spelled()
            counted = self.part.spelled(counted=True)
        else:
            free = counted = f"(?:{self.part.spelled()})"
        if self.most is None:
            first = {0: "", 1: free}.get(self.least, f"{counted}{{{self.least}}}")
            return f"{first}{free}*"
        if self.most == 1:
            return free if self.least else f"{free}?"
        return f"{counted}{{{self.least},{self.most}}}"


_Node = _Chars | _Sequence | _Choice | _Repeat


class _Parser:
    """Reads one pattern, from left to right."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def read(self) -> _Node:
        tree = self._choice(outermost=True)
        if self._at < len(self._text):
            raise UnsupportedPatternError(f"it has a ) at {self._at} that closes nothing")
        return tree

    def _choice(self, *, outermost: bool = False) -> _Node:
        parts = [self._sequence(outermost)]
        while self._taken("|"):
            parts.append(self._sequence(outermost))
        return parts[0] if len(parts) == 1 else _Choice(tuple(parts))

    def _sequence(self, outermost: bool) -> _Node:
        if outermost:
            self._taken("^")
        parts: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if (
                outermost
                and self._text[self._at] == "$"
                and self._text[self._at + 1 : self._at + 2] in ("", "|")
            ):
                self._at += 1
                break
            parts.append(self._repeated(self._atom()))
        return _Sequence(tuple(parts))

    def _repeated(self, part: _Node) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return part
        self._taken("?")  # lazy or greedy: the same strings
        least, most = bounds
        if most is not None and most < least:
            raise UnsupportedPatternError(f"it repeats {least} to {most} times")
        if max(least, most or 0) > _MOST_REPEATS:
            raise UnsupportedPatternError(f"it repeats more than {_MOST_REPEATS} times")
        return _Repeat(part, least, most)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._taken(sign):
                return bounds
        if self._text[self._at : self._at + 1] != "{":
            return None
        body, closed, _ = self._text[self._at + 1 :].partition("}")
        least, comma, most = body.partition(",")
        if not closed or not least.isdecimal() or not (most.isdecimal() or most == ""):
            return None  # a brace that stands for itself
        self._at += len(body) + 2
        return int(least), int(most) if most else None if comma else int(least)

    def _atom(self) -> _Node:
        here = self._at
        character = self._next()
        if character == "(":
            return self._group(here)
        if character == "[":
            return _Chars(self._set())
        if character == ".":
            return _Chars(_but(_LINE_ENDS))
        if character == "\\":
            return _Chars(self._escape())
        if character in "^$":
            raise UnsupportedPatternError(f"it has an anchor inside, {character} at {here}")
        if character in "*+?":
            raise UnsupportedPatternError(f"there is nothing for {character} at {here} to repeat")
        return _Chars(((ord(character), ord(character)),))

    def _group(self, here: int) -> _Node:
        if self._taken("?"):
            if self._text[self._at : self._at + 1] in ("=", "!") or self._text[self._at : self._at + 2] in (
                "<=",
                "<!",
            ):
                raise UnsupportedPatternError(f"it looks ahead or behind at {here}")
            if self._taken("<"):
                self._at = self._text.find(">", self._at) + 1
                if not self._at:
                    raise UnsupportedPatternError(f"the name of the group at {here} does not end")
            elif not self._taken(":"):
                raise UnsupportedPatternError(f"it has a group of an unknown kind at {here}")
        inside = self._choice()
        if not self._taken(")"):
            raise UnsupportedPatternError(f"the group at {here} is not closed")
        return inside

    def _set(self) -> Ranges:
        here = self._at - 1
        negated = self._taken("^")
        found: list[tuple[int, int]] = []
        while not self._taken("]"):
            if self._at >= len(self._text):
                raise UnsupportedPatternError(f"the set of characters at {here} is not closed")
            low = self._member()
            single = len(low) == 1 and low[0][0] == low[0][1]
            ends = self._text[self._at : self._at + 1] == "-" and self._text[
                self._at + 1 : self._at + 2
            ] not in ("", "]")
            if single and ends:
                self._at += 1
                high = self._member()
                if len(high) != 1 or high[0][0] != high[0][1] or high[0][0] < low[0][0]:
                    raise UnsupportedPatternError(
                        f"the set of characters at {here} has a range that ends before it begins"
                    )
                found.append((low[0][0], high[0][0]))
            else:
                found += low
        ranges = _union(found)
        return _but(ranges) if negated else ranges

    def _member(self) -> Ranges:
        character = self._next()
        if character != "\\":
            return ((ord(character), ord(character)),)
        if self._taken("b"):
            return ((0x08, 0x08),)
        return self._escape()

    def _escape(self) -> Ranges:
        here = self._at - 1
        kind = self._next()
        if kind in _CLASSES:
            return _CLASSES[kind]
        if kind in _CONTROLS:
            code = _CONTROLS[kind]
        elif kind == "x":
            code = self._hex(2, here)
        elif kind == "u":
            code = self._unicode(here)
        elif kind == "c":
            code = ord(self._next()) % 32
        elif kind.isalnum():
            raise UnsupportedPatternError(f"it has \\{kind} at {here}, which no grammar can hold")
        else:
            code = ord(kind)
        return ((code, code),)

    def _unicode(self, here: int) -> int:
        if self._taken("{"):
            digits, closed, _ = self._text[self._at :].partition("}")
            self._at += len(digits) + 1
            if closed and digits and all(digit in "0123456789abcdefABCDEF" for digit in digits):
                code = int(digits, 16)
                if code <= _LAST:
                    return code
            raise UnsupportedPatternError(f"its \\u{{{digits} at {here} names no character")
        code = self._hex(4, here)
        if 0xD800 <= code < 0xDC00 and self._text[self._at : self._at + 2] == "\\u":
            self._at += 2
            return 0x10000 + ((code - 0xD800) << 10) + (self._hex(4, here) - 0xDC00)
        return code

    def _hex(self, count: int, here: int) -> int:
        digits = self._text[self._at : self._at + count]
        self._at += count
        try:
            return int(digits, 16) if len(digits) == count else int("")
        except ValueError:
            raise UnsupportedPatternError(f"its escape at {here} names no character") from None

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise UnsupportedPatternError("it ends in the middle")
        self._at += 1
        return self._text[self._at - 1]

    def _taken(self, character: str) -> bool:
        if self._text[self._at : self._at + 1] != character:
            return False
        self._at += 1
        return True
