"""What a request may ask of the connector, and what it is told.

Everything travels in vLLM's own `kv_transfer_params`, under one name, as plain JSON: in process through
`SamplingParams.extra_args`, over HTTP as a field of the request. A client is never trusted: it proves its owner by a
token, names blobs only by keys that the server computed, and whatever it sends that is not exactly of the shape below
is a `Refusal`, never an exception.

    {"inferscale": {"op": ..., "owner": o, "token": t, ...}} with, by op:

    encode   "spans": [[start, stop], ...], "segments": [[key, tokens], ...], "nonce": s, "mentions": [[tag, at], ...]
    inject   "segments": [[key, tokens], ...], "nonce": s, "mentions": [[tag, at], ...], "receipt": r
    probe    "keys": [key, ...]
    forget   "keys": [key, ...], "tags": [tag, ...]
    outcome  "receipt": r

A streamed answer over HTTP has no place for the connector's reply. So an inject may carry a receipt, a name that its
client makes up for it, under which the same owner can ask once, when the stream has ended, what became of it.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from inferscale_memory.kv.key import hash_fields

NAME = "inferscale"
MAX_ITEMS = 65_536
"""Most segments, spans, keys, tags or mentions in one request."""
MAX_TEXT = 512
"""Most characters in an owner, key, tag, nonce, receipt or token."""
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
    mentions these tags: a tag is as good as a password for that, so make it one that nobody guesses."""

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
    flat = [part for key, tokens in segments for part in (key.encode(), str(tokens).encode())]
    scale = b"1"  # keys are injected as they were computed
    return hash_fields(
        secret, b"compose", fingerprint.encode(), owner.encode(), lora.encode(), scale, nonce.encode(), *flat
    )


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
    flat = [part for key, tokens in segments for part in (key.encode(), str(tokens).encode())]
    based = [nonce.encode(), *flat] if segments else []
    return hash_fields(secret, b"encode", fingerprint.encode(), owner.encode(), lora.encode(), *based)


def text_salt(secret: bytes, fingerprint: str, owner: str, *, nonce: str = "") -> str:
    """`cache_salt` of a prompt of this owner that is served as text."""
    return hash_fields(secret, b"text", fingerprint.encode(), owner.encode(), nonce.encode())


# -- writing ----------------------------------------------------------------------------------------------------------


def params(ask: Ask, secret: bytes) -> dict[str, Any]:
    """The `kv_transfer_params` that say `ask`, signed for its owner."""
    body: dict[str, Any] = {
        "op": type(ask).__name__.lower(),
        "owner": ask.owner,
        "token": sign_owner(secret, ask.owner),
    }
    match ask:
        case Encode():
            body |= {"spans": [list(s) for s in ask.spans], "mentions": [list(m) for m in ask.mentions]}
            if ask.segments:
                body |= {"segments": [list(s) for s in ask.segments], "nonce": ask.nonce}
        case Inject():
            body |= {"segments": [list(s) for s in ask.segments], "nonce": ask.nonce}
            body |= {"mentions": [list(m) for m in ask.mentions]}
            if ask.receipt:
                body["receipt"] = ask.receipt
        case Probe():
            body |= {"keys": list(ask.keys)}
        case Forget():
            body |= {"keys": list(ask.keys), "tags": list(ask.tags)}
        case Outcome():
            body |= {"receipt": ask.receipt}
    return {NAME: body}


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
        case "encode":
            return Encode(owner, _spans(body), _mentions(body), _segments(body), _text(body, "nonce"))
        case "inject":
            return Inject(
                owner, _segments(body), _text(body, "nonce"), _mentions(body), _text(body, "receipt")
            )
        case "probe":
            return Probe(owner, _texts(body, "keys"))
        case "forget":
            return Forget(owner, _texts(body, "keys"), _texts(body, "tags"))
        case "outcome":
            return Outcome(owner, _text(body, "receipt"))
        case _:
            raise _MalformedError("'op' must be encode, inject, probe, forget or outcome")


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name, "")
    if not _is_text(value):
        raise _MalformedError(f"'{name}' must be a string of at most {MAX_TEXT} characters")
    return str(value)


def _texts(body: dict[str, Any], name: str) -> tuple[str, ...]:
    values = _list(body, name)
    if not all(_is_text(value) for value in values):
        raise _MalformedError(f"'{name}' must hold strings of at most {MAX_TEXT} characters")
    return tuple(values)


def _is_text(value: Any) -> bool:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can carry
        return False
    return True


def _list(body: dict[str, Any], name: str) -> list[Any]:
    values = body.get(name, [])
    if not isinstance(values, list | tuple) or len(values) > MAX_ITEMS:
        raise _MalformedError(f"'{name}' must be a list of at most {MAX_ITEMS} items")
    return list(values)


def _pairs(body: dict[str, Any], name: str) -> list[tuple[Any, Any]]:
    values = _list(body, name)
    if not all(isinstance(value, list | tuple) and len(value) == 2 for value in values):
        raise _MalformedError(f"'{name}' must hold pairs")
    return [(first, second) for first, second in values]


def _is_position(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_POSITION


def _mentions(body: dict[str, Any]) -> tuple[Mention, ...]:
    pairs = _pairs(body, "mentions")
    if not all(_is_text(tag) and _is_position(at) for tag, at in pairs):
        raise _MalformedError("'mentions' must hold [tag, position]")
    return tuple(pairs)


def _segments(body: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    pairs = _pairs(body, "segments")
    if not all(_is_text(key) and _is_position(tokens) and tokens > 0 for key, tokens in pairs):
        raise _MalformedError("'segments' must hold [key, tokens]")
    return tuple(pairs)


def _spans(body: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    pairs = _pairs(body, "spans")
    end = 0
    for start, stop in pairs:
        if not (_is_position(start) and _is_position(stop) and end <= start < stop):
            raise _MalformedError("'spans' must hold ordered, disjoint, non-empty [start, stop]")
        end = stop
    if not pairs:
        raise _MalformedError("'spans' is empty: nothing would be kept")
    return tuple(pairs)
