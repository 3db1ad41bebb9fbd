"""What a request may ask of the connector, and what it is told.

Everything travels in vLLM's own `kv_transfer_params`, under one name, as plain JSON: in process through
`SamplingParams.extra_args`, over HTTP as a field of the request. A client is never trusted: it proves its owner by a
token, names blobs only by keys that the server computed, and whatever it sends that is not exactly of the shape below
is a `Refusal`, never an exception.

    {"inferscale": {"op": ..., "owner": o, "token": t, ...}} with, by op:

    encode   "spans": [[start, stop], ...], "segments": [[key, tokens], ...], "nonce": s, "mentions": [[tag, at], ...],
             "seal": s
    inject   "segments": [[key, tokens], ...], "nonce": s, "mentions": [[tag, at], ...], "seal": s, "receipt": r
    probe    "keys": [key, ...]
    forget   "keys": [key, ...], "tags": [tag, ...], "seal": s
    outcome  "receipt": r

A tag names a fact, whoever owns it: an agent's fact may stand as text in a user's prompt. So a token is not enough to
name one. On the wire a tag is a MAC under the server's secret, and whoever mentions or forgets tags needs a seal, a MAC
of the owner, of what is done with the tags and of all of them. An encode and an inject need it without any tags too. So
a client that holds a token alone can neither guess a tag, nor forget one that it has seen in a prompt, nor have names
remembered for its own prompts, and what else is in its requests is not even read.

A streamed answer over HTTP has no place for the connector's reply. So an inject may carry a receipt, a name that its
client makes up for it, under which the same owner can ask once, when the stream has ended, what became of it.
"""

from __future__ import annotations

import hmac
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import le, lt
from typing import Any

import numpy as np

from inferscale_memory.kv.key import composition_fields, hash_fields

NAME = "inferscale"
MAX_ITEMS = 4096
"""Most keys, tags, mentions or segments in one request, spans counted among the segments. Reading them takes time from
everybody's steps."""
MAX_TEXT = 512
"""Most characters in an owner, nonce, receipt or token."""
MAX_NAME = 40
"""Most characters in a key or tag on the wire, on average over a list: as many as ours have."""
MAX_POSITION = 2**31

Mention = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Encode:
    """Prefill this prompt and keep one blob per span. It begins with the blobs of `segments`, (key, tokens) each, in
    this order: all of them are injected, or nothing is kept. Then it needs a `nonce` that was never used: a cached
    block may hold what was prefilled in their place, which is the same text, but not what they hold."""

    owner: str
    spans: tuple[tuple[int, int], ...]
    mentions: tuple[Mention, ...] = ()
    segments: tuple[tuple[str, int], ...] = ()
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Inject:
    """The prompt begins with these blobs, (key, tokens) each, in this order. With a `receipt`, what became of it can
    be asked afterwards."""

    owner: str
    segments: tuple[tuple[str, int], ...]
    nonce: str = ""
    mentions: tuple[Mention, ...] = ()
    receipt: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """Which of these keys are at hand, and what model is this?"""

    owner: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop these blobs of the owner everywhere, and every cached block that holds them or, in whosever prompt,
    mentions these tags."""

    owner: str
    keys: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the inject of this owner that carried this receipt? It is told once."""

    owner: str
    receipt: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request is served as text, and told why."""

    reason: str


Ask = Encode | Inject | Probe | Forget | Outcome


# -- owner tokens and salts -------------------------------------------------------------------------------------------


def sign_owner(secret: bytes, owner: str, *, lifetime_s: float = 3600.0) -> str:
    """A token that proves, until it expires, that its bearer may act for `owner`."""
    expires = str(int(time.time() + lifetime_s))
    return f"{expires}.{_owner_mac(secret, owner, expires)}"


def owner_proved(secret: bytes, owner: str, token: str) -> bool:
    """Whether `token` was signed for `owner` with this secret and has not expired."""
    expires, _, mac = token.partition(".")
    if not (expires.isascii() and expires.isdigit() and len(expires) < 20):
        return False
    expected = _owner_mac(secret, owner, expires)
    return hmac.compare_digest(mac.encode(), expected.encode()) and int(expires) > time.time()


def _owner_mac(secret: bytes, owner: str, expires: str) -> str:
    return blake2b(f"{expires}\0{owner}".encode(), key=secret, digest_size=20, person=b"owner").hexdigest()


def compose_salt(
    secret: bytes,
    fingerprint: str,
    owner: str,
    segments: Sequence[tuple[str, int]],
    *,
    lora: str = "",
    nonce: str = "",
) -> str:
    """`cache_salt` under which, and only under which, a request is injected with this composition."""
    scale = b"1"  # keys are injected as they were computed
    names = (fingerprint.encode(), owner.encode(), lora.encode(), scale, nonce.encode())
    return hash_fields(secret, b"compose", *names, *composition_fields(segments))


def encode_salt(
    secret: bytes,
    fingerprint: str,
    owner: str,
    segments: Sequence[tuple[str, int]] = (),
    *,
    lora: str = "",
    nonce: str = "",
) -> str:
    """`cache_salt` under which, and only under which, an encode of this owner runs that begins with these blobs."""
    based = [nonce.encode(), *composition_fields(segments)] if segments else []
    return hash_fields(secret, b"encode", fingerprint.encode(), owner.encode(), lora.encode(), *based)


def text_salt(secret: bytes, fingerprint: str, owner: str, *, nonce: str = "") -> str:
    """`cache_salt` of a prompt of this owner that is served as text."""
    return hash_fields(secret, b"text", fingerprint.encode(), owner.encode(), nonce.encode())


def same_text(one: str | None, other: str) -> bool:
    """Whether two texts are equal, in a time that does not tell how much of them is."""
    return hmac.compare_digest((one or "").encode(errors="replace"), other.encode())


# -- tags -------------------------------------------------------------------------------------------------------------


def wire_tag(secret: bytes, tag: str) -> str:
    """What stands for a tag in requests: 40 hex digits that nobody can make without the secret."""
    return blake2b(tag.encode(), key=secret, digest_size=20, person=b"tag").hexdigest()


def seal(secret: bytes, use: str, owner: str, tags: Iterable[str]) -> str:
    """Proof that a holder of the secret lets `owner` name these tags, as they are on the wire.

    Args:
        use: "mention" or "forget". A seal for one is none for the other.
    """
    text = "\0".join((use, str(len(owner)), owner, *tags))
    return blake2b(text.encode(), key=secret, digest_size=20, person=b"seal").hexdigest()


# -- writing ----------------------------------------------------------------------------------------------------------


def params(ask: Ask, secret: bytes) -> dict[str, Any]:
    """The `kv_transfer_params` that say `ask`, signed for its owner. Tags are made into those of the wire."""
    body: dict[str, Any] = {
        "op": type(ask).__name__.lower(),
        "owner": ask.owner,
        "token": sign_owner(secret, ask.owner),
    }
    match ask:
        case Encode():
            body |= {"spans": [list(s) for s in ask.spans]} | _sealed_mentions(ask, secret)
            if ask.segments:
                body |= {"segments": [list(s) for s in ask.segments], "nonce": ask.nonce}
        case Inject():
            body |= {"segments": [list(s) for s in ask.segments], "nonce": ask.nonce}
            body |= _sealed_mentions(ask, secret)
            if ask.receipt:
                body["receipt"] = ask.receipt
        case Probe():
            body |= {"keys": list(ask.keys)}
        case Forget():
            tags = [wire_tag(secret, tag) for tag in ask.tags]
            body |= {"keys": list(ask.keys), "tags": tags}
            if tags:
                body["seal"] = seal(secret, "forget", ask.owner, tags)
        case Outcome():
            body |= {"receipt": ask.receipt}
    return {NAME: body}


def _sealed_mentions(ask: Encode | Inject, secret: bytes) -> dict[str, Any]:
    tags = {tag: wire_tag(secret, tag) for tag, _ in ask.mentions}
    sealed = seal(secret, "mention", ask.owner, (tags[tag] for tag, _ in ask.mentions))
    return {"mentions": [[tags[tag], at] for tag, at in ask.mentions], "seal": sealed}


# -- reading ----------------------------------------------------------------------------------------------------------


class _MalformedError(Exception):
    pass


def parse(raw: Any, secret: bytes) -> Ask | Refusal | None:
    """What a request asks. None when it asks nothing of us; a Refusal when it asks wrongly. Never raises."""
    if not isinstance(raw, dict) or NAME not in raw:
        return None
    try:
        return _parse(raw[NAME], secret)
    except _MalformedError as problem:
        return Refusal(f"malformed request: {problem}")


def _parse(body: Any, secret: bytes) -> Ask | Refusal:
    if not isinstance(body, dict):
        raise _MalformedError(f"'{NAME}' must be an object")
    owner, token = _text(body, "owner"), _text(body, "token")
    if not secret:
        return Refusal("the server has no secret, so it cannot check who is asking; set INFERSCALE_SECRET")
    if not owner:
        raise _MalformedError("'owner' is empty")
    if not owner_proved(secret, owner, token):
        return Refusal("the owner token is missing, expired or of another owner or secret")
    match body.get("op"):
        case "encode":  # mentions first: without the seal nothing else is read
            mentions = _mentions(body, owner, secret)
            if len(_list(body, "spans")) + len(_list(body, "segments")) > MAX_ITEMS:
                raise _MalformedError(f"'spans' and 'segments' may hold {MAX_ITEMS} items together")
            return Encode(owner, _spans(body), mentions, _segments(body), _text(body, "nonce"))
        case "inject":
            mentions = _mentions(body, owner, secret)
            return Inject(owner, _segments(body), _text(body, "nonce"), mentions, _text(body, "receipt"))
        case "probe":
            return Probe(owner, _names(body, "keys"))
        case "forget":
            tags = _names(body, "tags")
            if tags:
                _check_seal(body, "forget", owner, tags, secret)
            return Forget(owner, _names(body, "keys"), tags)
        case "outcome":
            return Outcome(owner, _text(body, "receipt"))
        case _:
            raise _MalformedError("'op' must be encode, inject, probe, forget or outcome")


def _check_seal(body: dict[str, Any], use: str, owner: str, tags: Sequence[str], secret: bytes) -> None:
    if not same_text(_text(body, "seal"), seal(secret, use, owner, tags)):
        raise _MalformedError("its seal is missing, or of other tags, another owner, use or secret")


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name, "")
    if not isinstance(value, str) or len(value) > MAX_TEXT or not _encodes(value):
        raise _MalformedError(f"'{name}' must be a string of at most {MAX_TEXT} characters")
    return str(value)


def _encodes(text: str) -> bool:
    """Whether it has no lone surrogate, which JSON can carry."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Lists may hold thousands of items, and their reading takes time from everybody's steps: what is checked of all items
# is checked by built-ins over whole columns.


def _list(body: dict[str, Any], name: str) -> Sequence[Any]:
    values = body.get(name, ())
    if not isinstance(values, list | tuple) or len(values) > MAX_ITEMS:
        raise _MalformedError(f"'{name}' must be a list of at most {MAX_ITEMS} items")
    return values


def _names(body: dict[str, Any], name: str) -> tuple[str, ...]:
    values = tuple(_list(body, name))
    if not _are_names(values):
        raise _MalformedError(
            f"'{name}' must hold strings of at most {MAX_NAME} characters, as keys and tags have"
        )
    return values


def _columns(body: dict[str, Any], name: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The first and the second of all pairs."""
    values = _list(body, name)
    if not values:
        return (), ()
    try:
        if set(map(type, values)) <= {list, tuple}:
            first, second = zip(*values, strict=True)
            return first, second
    except ValueError:  # they are not all pairs
        pass
    raise _MalformedError(f"'{name}' must hold pairs")


def _are_names(values: Sequence[Any]) -> bool:
    try:
        text = "".join(values)
    except TypeError:  # they are not all strings
        return False
    return len(text) <= MAX_NAME * len(values) and "\0" not in text and _encodes(text)


def _are_positions(values: Sequence[Any], least: int = 0) -> bool:
    if not values:
        return True
    if set(map(type, values)) != {int}:
        return False
    try:
        numbers = np.frombuffer(array("q", values), dtype=np.int64)
    except OverflowError:
        return False
    return bool(numbers.min() >= least and numbers.max() < MAX_POSITION)


def _mentions(body: dict[str, Any], owner: str, secret: bytes) -> tuple[Mention, ...]:
    tags, positions = _columns(body, "mentions")
    if not (_are_names(tags) and _are_positions(positions)):
        raise _MalformedError("'mentions' must hold [tag, position]")
    _check_seal(body, "mention", owner, tags, secret)
    return tuple(zip(tags, positions, strict=True))


def _segments(body: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    keys, tokens = _columns(body, "segments")
    if not (_are_names(keys) and _are_positions(tokens, least=1)):
        raise _MalformedError("'segments' must hold [key, tokens]")
    return tuple(zip(keys, tokens, strict=True))


def _spans(body: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    starts, stops = _columns(body, "spans")
    if not starts:
        raise _MalformedError("'spans' is empty: nothing would be kept")
    right = _are_positions(starts) and _are_positions(stops)
    if not right or not all(map(lt, starts, stops)) or not all(map(le, stops, starts[1:])):
        raise _MalformedError("'spans' must hold ordered, disjoint, non-empty [start, stop]")
    return tuple(zip(starts, stops, strict=True))
