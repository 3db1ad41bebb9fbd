"""JSON schemas that answers are kept within: one verdict, and one form, for every engine.

Engines differ in what they refuse and in what they pass over without a word. So a schema is read here, before an engine
sees it: what can be kept is rewritten into the few forms that all of them keep exactly, everything else is refused by
keyword and path. Every finished answer within `kept(schema)` is JSON that validates against `schema`; it may be that
not every valid answer can be given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, floor, isfinite
from typing import Any
from urllib.parse import unquote

from inferscale_memory.arguments import MAX_DEPTH, as_plain
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.prompt.json_pattern import UnsupportedPatternError, spelled

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

_OF_TYPE = {
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "array": frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"}
    ),
}
_IMPLIES = {
    **{word: kind for kind in ("string", "array", "object") for word in _OF_TYPE[kind]},
    **dict.fromkeys(_OF_TYPE["number"], "number"),
}
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords that say all about a value; beside one of them only a type is understood."""
_REFUSED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "patternProperties",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_HARMLESS = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}
"""Values with which a keyword says nothing."""

_YEAR = r"(?:\d{3}[1-9]|\d{2}[1-9]0|\d[1-9]00|[1-9]000)"
_LEAP = r"(?:\d{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP}-02-29)"
)
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_ATOM = r"[\w!#$%&'*+/=?^`{|}~-]+"
_LABEL = r"[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
_SPELT_FORMATS = {
    "date": f"^{_DAY}$",
    "time": f"^{_CLOCK}$",
    "date-time": f"^{_DAY}T{_CLOCK}$",
    "ipv4": rf"^{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+$",
    "json-pointer": r"^(?:/(?:[^/~]|~[01])*)*$",
    "relative-json-pointer": r"^(?:0|[1-9]\d*)(?:#|(?:/(?:[^/~]|~[01])*)*)$",
}
"""Formats whose grammar in the engines lets through what is no such thing (the 31st of June), or no JSON."""
FORMATS = frozenset({"duration", "ipv6", "hostname", "uuid", "uri", "uri-reference"})
"""Formats that the engines' own grammars keep."""
_SAYS_NOTHING = frozenset({"password", "path", "file-path", "directory-path", "binary"})
"""Formats that say what a string is for, not how it is spelled."""
_PRECISION = 6
"""Decimals to which the engines' grammars keep the bounds of a number."""
_INT64 = 2**63


def read_schema(schema: Mapping[str, Any] | str, name: str = "json_schema") -> str:
    """A schema as text, with keys in the order given: it is the order in which the answer has them.

    Raises:
        ConfigurationError: it is no JSON, no object, or no answer can be kept within it.
    """
    try:
        read = json.loads(schema) if isinstance(schema, str) else dict(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{name} is not JSON ({error}): pass a JSON schema") from error
    if not isinstance(read, dict):
        raise ConfigurationError(f"{name} is a {type(read).__name__}: pass a JSON schema, which is an object")
    try:
        text = json.dumps(as_plain(read, name), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{name} is not JSON ({error}): pass a JSON schema") from error
    kept(text, name)
    return text


@lru_cache(maxsize=256)
def kept(schema: str, name: str = "json_schema") -> str:
    """The form of a schema, which `read_schema` gave, that engines keep answers within.

    Raises:
        ConfigurationError: no answer can be kept within it. The message names the keyword and the path to it.
    """
    return json.dumps(_Normal(json.loads(schema), name).whole(), ensure_ascii=False)


class _Normal:
    """Rewrites one schema. Paths are JSON pointers into it."""

    def __init__(self, root: dict[str, Any], name: str) -> None:
        self._root = root
        self._name = name
        self._names: dict[str, str] = {}
        self._definitions: dict[str, dict[str, Any]] = {}

    def whole(self) -> dict[str, Any]:
        schema = self._schema(self._root, "#")
        seen: set[str] = set()
        while "$ref" in schema:
            target = schema["$ref"].rpartition("/")[2]
            if target in seen:
                raise self._refusal("#", "$ref", "refers to nothing but itself")
            seen.add(target)
            schema = self._definitions[target]
        self._check_recursion(schema)
        if self._definitions:
            schema = {**schema, "$defs": self._definitions}
        if _depth(schema) > MAX_DEPTH:
            raise ConfigurationError(f"{self._name} is nested more than {MAX_DEPTH} levels deep: flatten it")
        return schema

    # -- one schema ----------------------------------------------------------------------------------------------

    def _schema(self, schema: Any, path: str) -> dict[str, Any]:
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise self._refusal(path, "", f"is {json.dumps(schema)[:40]}: pass a schema, which is an object")
        for keyword in _REFUSED & schema.keys():
            if not (keyword in _HARMLESS and schema[keyword] is _HARMLESS[keyword]):
                raise self._refusal(path, keyword, "cannot be kept while an answer is written: leave it out")
        types = self._types(schema, path)
        whole = [keyword for keyword in _WHOLE if keyword in schema]
        if not whole:
            return self._by_type(schema, types, path)
        beside = [keyword for keyword in schema if keyword in _IMPLIES or keyword in whole[1:]]
        if beside and not (whole == ["enum", "const"] or whole == ["const", "enum"]):
            raise self._refusal(path, beside[0], f"cannot be kept beside {whole[0]}: say both in one of them")
        if "const" in schema or "enum" in schema:
            return self._values(schema, types, path)
        if "$ref" in schema:
            if types is not None:
                raise self._refusal(path, "type", "cannot be kept beside $ref: leave it out")
            return self._reference(schema["$ref"], path)
        return self._choice(schema, whole[0], types, path)

    def _types(self, schema: Mapping[str, Any], path: str) -> list[str] | None:
        """The types that `schema` names; None where it names none."""
        if "type" not in schema:
            return None
        named = schema["type"]
        types = named if isinstance(named, list) else [named]
        for kind in types:
            if not isinstance(kind, str) or kind not in TYPES:
                raise self._refusal(
                    path, "type", f"is {json.dumps(kind)[:40]}: use one of {', '.join(TYPES)}"
                )
        if not types:
            raise self._refusal(path, "type", "names no type, so that nothing is valid")
        return list(dict.fromkeys(types))

    def _by_type(self, schema: Mapping[str, Any], types: list[str] | None, path: str) -> dict[str, Any]:
        if types is None:
            implied = list(dict.fromkeys(_IMPLIES[keyword] for keyword in schema if keyword in _IMPLIES))
            if not implied:
                return {}
            types = implied
        made = [self._of_type(kind, schema, path) for kind in types]
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _of_type(self, kind: str, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        if kind in ("integer", "number"):
            return self._number(kind, schema, path)
        if kind == "string":
            return self._string(schema, path)
        if kind == "array":
            return self._array(schema, path)
        if kind == "object":
            return self._object(schema, path)
        return {"type": kind}

    def _values(self, schema: Mapping[str, Any], types: list[str] | None, path: str) -> dict[str, Any]:
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list) or not values:
            raise self._refusal(path, "enum", "is no list of values: name at least one")
        if "const" in schema:
            values = [value for value in values if value == schema["const"]]
        valid = [value for value in values if types is None or any(_is_of(value, kind) for kind in types)]
        if not valid:
            raise self._refusal(path, "enum" if "enum" in schema else "const", "has no value that is valid")
        return {"const": valid[0]} if len(valid) == 1 else {"enum": valid}

    def _choice(
        self, schema: Mapping[str, Any], keyword: str, types: list[str] | None, path: str
    ) -> dict[str, Any]:
        branches = schema[keyword]
        if not isinstance(branches, list) or not branches:
            raise self._refusal(path, keyword, "is no list of schemas: name at least one")
        if keyword == "allOf" and len(branches) > 1:
            raise self._refusal(path, keyword, "of several schemas cannot be kept: write them as one")
        made = []
        for number, branch in enumerate(branches):
            below = f"{path}/{keyword}/{number}"
            if types is not None and isinstance(branch, dict) and "$ref" not in branch:
                own = self._types(branch, below)
                both = types if own is None else [kind for kind in own if kind in types]
                if not both:
                    continue
                branch = {**branch, "type": both if len(both) > 1 else both[0]}
            elif types is not None:
                raise self._refusal(path, "type", f"cannot be kept beside {keyword}: leave it out")
            made.append(self._schema(branch, below))
        if not made:
            raise self._refusal(path, keyword, "has no branch of the type beside it")
        if keyword == "oneOf":
            self._check_disjoint(made, path)
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _check_disjoint(self, branches: Sequence[dict[str, Any]], path: str) -> None:
        """A grammar takes any of them, which is one of them only where no value is valid in two."""
        for number, left in enumerate(branches):
            for right in branches[number + 1 :]:
                if not self._apart(left, right):
                    raise self._refusal(
                        path,
                        "oneOf",
                        "has branches that may both be valid: use anyOf, or a const that tells them apart",
                    )

    def _apart(self, left: dict[str, Any], right: dict[str, Any]) -> bool:
        left, right = self._followed(left), self._followed(right)
        for one, other in ((left, right), (right, left)):
            if "anyOf" in one:
                return all(self._apart(branch, other) for branch in one["anyOf"])
        mine, theirs = _listed(left), _listed(right)
        if mine is not None and theirs is not None:
            return not any(value == other for value in mine for other in theirs)
        for values, other in ((mine, right), (theirs, left)):
            if values is not None:
                return "type" in other and not any(_is_of(value, other["type"]) for value in values)
        if "type" not in left or "type" not in right:
            return False
        if left["type"] != right["type"]:
            return {left["type"], right["type"]} != {"integer", "number"}
        if left["type"] != "object":
            return False
        shared = set(left.get("required", ())) & set(right.get("required", ()))
        return any(
            _listed(left["properties"][key]) is not None
            and _listed(right["properties"][key]) is not None
            and self._apart(left["properties"][key], right["properties"][key])
            for key in shared
        )

    def _followed(self, schema: dict[str, Any]) -> dict[str, Any]:
        for _ in range(MAX_DEPTH):
            if "$ref" not in schema:
                return schema
            schema = self._definitions[schema["$ref"].rpartition("/")[2]]
        return {}

    # -- numbers and strings -------------------------------------------------------------------------------------

    def _number(self, kind: str, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        for keyword in _OF_TYPE[kind] & schema.keys():
            value = schema[keyword]
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
                raise self._refusal(path, keyword, f"is {json.dumps(value)[:40]}: pass a number")
        if "multipleOf" in schema and not (kind == "integer" and schema["multipleOf"] == 1):
            raise self._refusal(path, "multipleOf", "cannot be kept while an answer is written: leave it out")
        made: dict[str, Any] = {"type": kind}
        if kind == "integer":
            low = [ceil(schema["minimum"])] if "minimum" in schema else []
            low += [floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
            high = [floor(schema["maximum"])] if "maximum" in schema else []
            high += [ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
            made |= {"minimum": max(low)} if low else {}
            made |= {"maximum": min(high)} if high else {}
            if any(not -_INT64 <= made[word] < _INT64 for word in ("minimum", "maximum") if word in made):
                raise self._refusal(path, "minimum" if low else "maximum", "is beyond 64 bits: leave it out")
        else:
            for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
                if keyword in schema:
                    value = schema[keyword]
                    if round(value, _PRECISION) != value or abs(value) >= _INT64:
                        raise self._refusal(path, keyword, f"is kept to {_PRECISION} decimals: round it")
                    made[keyword] = value
        low_word = made.get("minimum", made.get("exclusiveMinimum"))
        high_word = made.get("maximum", made.get("exclusiveMaximum"))
        if low_word is not None and high_word is not None:
            open_ended = "exclusiveMinimum" in made or "exclusiveMaximum" in made
            if low_word > high_word or (open_ended and low_word == high_word):
                raise self._refusal(path, "minimum", "leaves no number under the maximum")
        return made

    def _string(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        least, most = self._bounds(schema, "minLength", "maxLength", path)
        pattern, form = schema.get("pattern"), schema.get("format")
        if pattern is not None and not isinstance(pattern, str):
            raise self._refusal(path, "pattern", "is no text: pass a regular expression")
        if form is not None and not isinstance(form, str):
            raise self._refusal(path, "format", "is no text: pass the name of a format")
        if form in _SAYS_NOTHING:
            form = None
        if form is not None and form not in FORMATS and form not in _SPELT_FORMATS:
            known = ", ".join(sorted({*FORMATS, *_SPELT_FORMATS}))
            raise self._refusal(path, "format", f"is {form!r}: use one of {known}, or leave it out")
        if form is not None and pattern:
            raise self._refusal(path, "format", "cannot be kept beside pattern: leave one of them out")
        if (form is not None or pattern) and (least or most is not None):
            keyword = "minLength" if least else "maxLength"
            beside = "format" if form is not None else "pattern"
            raise self._refusal(path, keyword, f"cannot be kept beside {beside}: leave one of them out")
        if form in _SPELT_FORMATS:
            return {"type": "string", "pattern": spelled(_SPELT_FORMATS[form])}
        if form is not None:
            return {"type": "string", "format": form}
        if pattern:
            return {"type": "string", "pattern": self._spelled(pattern, path)}
        if least or most is not None:
            return {"type": "string", "pattern": spelled(_of_length(least, most))}
        return {"type": "string"}

    def _spelled(self, pattern: str, path: str) -> str:
        try:
            return spelled(pattern)
        except (UnsupportedPatternError, RecursionError) as error:
            raise self._refusal(
                path, "pattern", f"is {pattern[:60]!r}, and {error}: write it otherwise"
            ) from None

    def _bounds(self, schema: Mapping[str, Any], low: str, high: str, path: str) -> tuple[int, int | None]:
        found: dict[str, int] = {}
        for keyword in (low, high):
            value = schema.get(keyword)
            if value is None:
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or value != int(value)
                or value < 0
            ):
                raise self._refusal(
                    path, keyword, f"is {json.dumps(value)[:40]}: pass a whole number from 0 on"
                )
            if value > 100_000:
                if keyword == low:
                    raise self._refusal(path, keyword, "is more than an answer can hold: pass at most 100000")
                continue
            found[keyword] = int(value)
        least, most = found.get(low, 0), found.get(high)
        if most is not None and least > most:
            raise self._refusal(path, low, f"is more than {high}, so that nothing is valid")
        return least, most

    # -- arrays and objects --------------------------------------------------------------------------------------

    def _array(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        if schema.get("uniqueItems", False) is not False:
            raise self._refusal(
                path, "uniqueItems", "cannot be kept while an answer is written: leave it out"
            )
        least, most = self._bounds(schema, "minItems", "maxItems", path)
        rest = schema.get("items", True)
        first = schema.get("prefixItems", [])
        rest_word, first_word = "items", "prefixItems"
        if isinstance(rest, list):  # as drafts before 2020 wrote it
            first, rest = rest, schema.get("additionalItems", True)
            rest_word, first_word = "additionalItems", "items"
        if not isinstance(first, list):
            raise self._refusal(path, first_word, "is no list of schemas")
        if most is not None and most <= len(first):
            first, rest = first[:most], False
        if rest is False:
            most = len(first)
        least = max(least, len(first))  # a grammar gives all of the first items, or none may follow
        if most is not None and least > most:
            raise self._refusal(path, "minItems", "asks for more items than there may be")
        made: dict[str, Any] = {"type": "array"}
        if first:
            made["prefixItems"] = [
                self._schema(item, f"{path}/{first_word}/{number}") for number, item in enumerate(first)
            ]
        if rest is False and first:
            made["items"] = False
        elif rest is not False and (first or rest is not True):
            made["items"] = self._schema(rest, f"{path}/{rest_word}")
        if least:
            made["minItems"] = least
        if most is not None:
            made["maxItems"] = most
        return made

    def _object(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            raise self._refusal(path, "properties", "is no object of schemas")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise self._refusal(path, "required", "is no list of names")
        rest = schema.get("additionalProperties", True)
        if rest is True and False in properties.values():
            rest = False  # or what is forbidden by name would come as one of the rest
        least, most = self._bounds(schema, "minProperties", "maxProperties", path)
        made: dict[str, Any] = {"type": "object"}
        named = {
            key: self._schema(value, f"{path}/properties/{_escaped(key)}")
            for key, value in properties.items()
            if value is not False
        }
        for key in dict.fromkeys(required):
            if key not in named:
                if rest is False or properties.get(key) is False:
                    raise self._refusal(path, "required", f"names {key!r}, which is no property there may be")
                named[key] = self._schema(rest, f"{path}/additionalProperties")
        if "propertyNames" in schema and schema["propertyNames"] is not True:
            if named:
                raise self._refusal(path, "propertyNames", "cannot be kept beside properties: leave it out")
            names = self._schema(schema["propertyNames"], f"{path}/propertyNames")
            values = _listed(names)
            if names.get("type") != "string" and not (
                values is not None and all(isinstance(value, str) for value in values)
            ):
                if names:
                    raise self._refusal(path, "propertyNames", "is no schema of a string")
            else:
                made["propertyNames"] = names
        if properties or named:
            made["properties"] = named
        if required:
            made["required"] = list(dict.fromkeys(required))
        if "additionalProperties" in schema or rest is False:
            made["additionalProperties"] = (
                rest if isinstance(rest, bool) else self._schema(rest, f"{path}/additionalProperties")
            )
        if least > len(made.get("required", ())):
            if made.get("additionalProperties", not named) is not False:
                # A name may come twice, and counts once.
                raise self._refusal(
                    path, "minProperties", "cannot be kept where any name may come: require names"
                )
            if least > len(named):
                raise self._refusal(path, "minProperties", "asks for more properties than there are")
            made["minProperties"] = least
        if most is not None:
            if most < len(made.get("required", ())):
                raise self._refusal(path, "maxProperties", "is less than the number of required properties")
            made["maxProperties"] = most
        return made

    # -- references ----------------------------------------------------------------------------------------------

    def _reference(self, target: Any, path: str) -> dict[str, Any]:
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            raise self._refusal(
                path, "$ref", f"is {str(target)[:60]!r}: refer to a part of the schema, as #/$defs/..."
            )
        if target not in self._names:
            found = self._found(target, path)
            name = self._names[target] = f"d{len(self._names)}"
            self._definitions[name] = {}
            self._definitions[name] = self._schema(found, target)
        return {"$ref": f"#/$defs/{self._names[target]}"}

    def _found(self, target: str, path: str) -> Any:
        node: Any = self._root
        for part in target.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                raise self._refusal(path, "$ref", f"is {target[:60]!r}, and there is nothing there")
        return node

    def _check_recursion(self, root: dict[str, Any]) -> None:
        """Raises ConfigurationError where a value would never end, or a reference refers to nothing but itself."""
        ends: set[str] = set()
        while True:
            more = {
                name
                for name, schema in self._definitions.items()
                if name not in ends and _can_end(schema, ends)
            }
            if not more:
                break
            ends |= more
        for target, name in self._names.items():
            if name not in ends:
                raise self._refusal(
                    target, "$ref", "refers to itself without end: make the reference optional"
                )
            if self._at_once(name, name, set()):
                raise self._refusal(
                    target, "$ref", "refers to itself before anything else: name a type first"
                )

    def _at_once(self, start: str, name: str, seen: set[str]) -> bool:
        """Whether the definition `name` is `start`, with nothing around it."""
        for branch in _branches(self._definitions[name]):
            if "$ref" in branch:
                target = branch["$ref"].rpartition("/")[2]
                if target == start:
                    return True
                if target not in seen and self._at_once(start, target, seen | {target}):
                    return True
        return False

    def _refusal(self, path: str, keyword: str, why: str) -> ConfigurationError:
        where = f"{path}/{keyword}" if keyword else path
        return ConfigurationError(f"{self._name}: {where} {why}")


def is_of_object(schema: Mapping[str, Any]) -> bool:
    """Whether all that is valid is an object, as far as a schema that can be kept says. One that cannot be kept is
    believed, unless its type says otherwise."""
    try:
        made = _Normal(dict(schema), "schema").whole()
    except (ConfigurationError, TypeError, ValueError):
        return bool(schema.get("type", "object") == "object")
    leaves = _branches(made)
    return not made or all("$ref" in leaf or leaf.get("type") == "object" for leaf in leaves)


def _of_length(least: int, most: int | None) -> str:
    """A pattern of every string of that many characters."""
    return f"^[^]{{{least},{'' if most is None else most}}}$"


def _is_of(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    if kind == "boolean":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    kinds: dict[str, Any] = {"number": (int, float), "string": str, "array": list, "object": dict}
    return isinstance(value, kinds[kind])


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """All values of a schema; None where they are not listed."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _branches(schema: dict[str, Any]) -> list[dict[str, Any]]:
    if "anyOf" not in schema:
        return [schema]
    return [leaf for branch in schema["anyOf"] for leaf in _branches(branch)]


def _can_end(schema: Any, ends: set[str]) -> bool:
    """Whether some value of `schema` is finite, where those definitions have one."""
    if not isinstance(schema, dict):
        return True
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2] in ends
    if "anyOf" in schema:
        return any(_can_end(branch, ends) for branch in schema["anyOf"])
    if schema.get("type") == "object":
        named = schema.get("properties", {})
        return all(_can_end(named[key], ends) for key in schema.get("required", ()))
    if schema.get("type") == "array" and schema.get("minItems"):
        first = schema.get("prefixItems", [])
        more = [schema.get("items", {})] if schema["minItems"] > len(first) else []
        return all(_can_end(item, ends) for item in (*first, *more))
    return True


def _depth(node: Any) -> int:
    deepest, level = 0, [node]
    while level:
        deepest += 1
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
    return deepest


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
