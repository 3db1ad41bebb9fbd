"""Whatever a client sends, the connector reads it right or refuses it; it never raises."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from inferscale_memory.connector import protocol
from inferscale_memory.connector.protocol import (
    MAX_ITEMS,
    MAX_NAME,
    MAX_POSITION,
    MAX_TEXT,
    NAME,
    Ask,
    Encode,
    Forget,
    Inject,
    Outcome,
    Probe,
    Refusal,
    compose_salt,
    encode_salt,
    owner_proved,
    params,
    parse,
    sign_owner,
    text_salt,
    wire_tag,
)

SECRET = b"the server's secret"
ASKS: list[Ask] = [
    Encode("alice", ((0, 4), (4, 9), (11, 12)), (("fact-1", 0), ("fact-1", 11))),
    Encode("alice", ((0, 1),)),
    Inject("alice", (("a" * 40, 17), ("b" * 40, 1)), "nonce", (("fact-2", 3),)),
    Inject("alice", (("same", 1), ("same", 1))),
    Inject("alice", ()),
    Inject("alice", (("a" * 40, 17),), receipt="r" * 32),
    Outcome("alice", "r" * 32),
    Probe("alice", ("a" * 40, "b" * 40)),
    Probe("alice"),
    Forget("alice", ("a" * 40,), ("fact-1", "fact-2")),
    Forget("alice"),
    Probe("ålice 爱丽丝 🙂\0", ("ключ",)),
]


def body(**fields: Any) -> dict[str, Any]:
    """The parameters of a probe of Alice's, signed and sealed for no tags, with some fields replaced."""
    ours = {"op": "probe", "owner": "alice", "token": sign_owner(SECRET, "alice"), "keys": []}
    ours["seal"] = protocol.seal(SECRET, "mention", "alice", [])
    return {NAME: ours | fields}


def on_the_wire(ask: Ask) -> Ask:
    """What is read of `ask`: its tags are those of the wire."""
    match ask:
        case Encode() | Inject():
            return replace(ask, mentions=tuple((wire_tag(SECRET, tag), at) for tag, at in ask.mentions))
        case Forget():
            return replace(ask, tags=tuple(wire_tag(SECRET, tag) for tag in ask.tags))
        case _:
            return ask


def refused(raw: Any, reason: str = "") -> bool:
    answer = parse(raw, SECRET)
    return isinstance(answer, Refusal) and reason in answer.reason


# -- what is asked arrives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ASKS, ids=str)
def test_what_is_asked_is_what_is_read_after_a_journey_as_json(ask: Ask) -> None:
    assert parse(json.loads(json.dumps(params(ask, SECRET))), SECRET) == on_the_wire(ask)


def test_parameters_of_somebody_else_ask_nothing_of_us() -> None:
    for raw in (None, {}, {"do_remote_prefill": True}, [], "inferscale", 7, [NAME]):
        assert parse(raw, SECRET) is None


def test_parameters_of_somebody_else_beside_ours_do_not_matter() -> None:
    assert parse({"do_remote_prefill": False} | params(ASKS[0], SECRET), SECRET) == on_the_wire(ASKS[0])


def test_the_largest_request_that_is_allowed_is_read() -> None:
    ask = Forget("o" * MAX_TEXT, ("k" * MAX_NAME,) * MAX_ITEMS, ("t",) * MAX_ITEMS)
    assert parse(params(ask, SECRET), SECRET) == on_the_wire(ask)


def test_nothing_that_was_left_out_is_needed() -> None:
    assert parse(body(op="inject"), SECRET) == Inject("alice", ())
    assert parse(body(op="forget"), SECRET) == Forget("alice")
    assert parse(body(op="outcome"), SECRET) == Outcome("alice", "")


# -- tags ----------------------------------------------------------------------------------------------------


def test_a_tag_on_the_wire_is_made_with_the_secret() -> None:
    tags = {wire_tag(SECRET, "t"), wire_tag(b"other", "t"), wire_tag(SECRET, "u"), wire_tag(b"", "t"), "t"}
    assert len(tags) == 5
    assert {len(tag) for tag in tags} == {40, 1}


@pytest.mark.parametrize(
    "ask", [ask for ask in ASKS if getattr(ask, "tags", getattr(ask, "mentions", ()))], ids=str
)
def test_tags_are_refused_without_a_seal_that_a_holder_of_the_secret_made(ask: Ask) -> None:
    """As somebody would make one who has a token of his own and has seen the tags."""
    theirs = params(ask, SECRET)[NAME]
    for seal in ("", "0" * 40, theirs["seal"][::-1], LONE, params(ask, b"other")[NAME]["seal"]):
        assert refused({NAME: theirs | {"seal": seal}}, "")
    own = {"owner": "mallory", "token": sign_owner(SECRET, "mallory")}
    assert refused({NAME: theirs | own}, "seal")
    for name in ("tags", "mentions"):
        if theirs.get(name):
            assert refused({NAME: theirs | {name: theirs[name][::-1] + theirs[name][:1]}}, "seal")
            assert refused({NAME: theirs | {name: theirs[name] + theirs[name]}}, "seal")


def test_a_seal_for_mentioning_tags_is_none_for_forgetting_them() -> None:
    mention = params(Inject("alice", (), mentions=(("t", 0),)), SECRET)[NAME]
    tags = [tag for tag, _ in mention["mentions"]]
    assert refused(body(op="forget", tags=tags, seal=mention["seal"]), "seal")


def test_an_owner_and_tags_are_told_apart_in_a_seal() -> None:
    splits = [
        ("a", ["b", "c"]),
        ("a\0b", ["c"]),
        ("a\0b\0c", []),
        ("", ["a", "b", "c"]),
        ("1\0a", ["b", "c"]),
    ]
    assert len({protocol.seal(SECRET, "forget", owner, tags) for owner, tags in splits}) == len(splits)


# -- owners --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["alice", "", "ålice", "爱丽丝", "a.b", "a\0b", "x" * 10_000])
def test_a_token_proves_its_owner(owner: str) -> None:
    assert owner_proved(SECRET, owner, sign_owner(SECRET, owner))


def test_a_token_proves_no_other_owner() -> None:
    token = sign_owner(SECRET, "alice")
    for other in ("bob", "", "alice ", "Alice", "alice\0", "alicе"):
        assert not owner_proved(SECRET, other, token)


def test_a_token_of_another_secret_proves_nothing() -> None:
    for other in (b"another", b"", SECRET + b"\0"):
        assert not owner_proved(SECRET, "alice", sign_owner(other, "alice"))


def test_an_expired_token_proves_nothing() -> None:
    assert not owner_proved(SECRET, "alice", sign_owner(SECRET, "alice", lifetime_s=-1))
    assert owner_proved(SECRET, "alice", sign_owner(SECRET, "alice", lifetime_s=2))


def test_a_token_whose_expiry_was_moved_proves_nothing() -> None:
    expires, mac = sign_owner(SECRET, "alice").split(".")
    for later in (str(int(expires) + 1), "9" * 19, "0" + expires, expires + " ", "+" + expires):
        assert not owner_proved(SECRET, "alice", f"{later}.{mac}")


def test_a_token_changed_in_any_character_proves_nothing() -> None:
    token = sign_owner(SECRET, "alice")
    for position in range(len(token)):
        for other in ("0", "f", ".", "é"):
            changed = token[:position] + other + token[position + 1 :]
            assert changed == token or not owner_proved(SECRET, "alice", changed)


@pytest.mark.parametrize(
    "token",
    [
        "",
        ".",
        "..",
        "x",
        ".abc",
        "123.",
        "é.é",
        "١٢٣.abc",
        "²³.abc",
        "-5.abc",
        "1e9.abc",
        "9" * 5_000,
        "1." * 5_000,
    ],
)
def test_what_is_no_token_proves_nothing(token: str) -> None:
    assert not owner_proved(SECRET, "alice", token)


def test_a_token_lives_as_long_as_it_says() -> None:
    expires = int(sign_owner(SECRET, "alice", lifetime_s=600).split(".")[0])
    assert expires == pytest.approx(time.time() + 600, abs=2)


def test_a_request_for_another_owner_is_refused() -> None:
    assert refused(body(owner="bob"), "owner token")
    assert refused(body(token=sign_owner(SECRET, "bob")), "owner token")
    assert refused(body(token=sign_owner(SECRET, "alice", lifetime_s=-1)), "owner token")
    assert refused(body(token=""), "owner token")


def test_a_request_without_an_owner_is_refused_even_when_signed() -> None:
    assert refused(body(owner="", token=sign_owner(SECRET, "")), "empty")


def test_without_a_secret_every_request_is_refused() -> None:
    """Otherwise anybody could sign: the key would be empty on both sides."""
    for ask in ASKS:
        answer = parse(params(ask, b""), b"")
        assert isinstance(answer, Refusal)
        assert "INFERSCALE_SECRET" in answer.reason


# -- salts ---------------------------------------------------------------------------------------------------


def test_every_field_changes_the_salt_of_a_composition() -> None:
    segments = (("key-1", 10), ("key-2", 5))
    salts = [
        compose_salt(SECRET, "model", "alice", segments),
        compose_salt(b"other", "model", "alice", segments),
        compose_salt(SECRET, "model2", "alice", segments),
        compose_salt(SECRET, "model", "bob", segments),
        compose_salt(SECRET, "model", "alice", segments, lora="adapter"),
        compose_salt(SECRET, "model", "alice", segments, nonce="n"),
        compose_salt(SECRET, "model", "alice", segments[::-1]),
        compose_salt(SECRET, "model", "alice", segments[:1]),
        compose_salt(SECRET, "model", "alice", ()),
        compose_salt(SECRET, "model", "alice", (("key-1", 10), ("key-2", 6))),
        compose_salt(SECRET, "model", "alice", (("key-1", 105), ("key-2", 5))),
        compose_salt(SECRET, "model", "alice", (("key-11", 0), ("key-2", 5))),
        compose_salt(SECRET, "model", "alice", (("key-1", 10), ("key-2", 5), ("", 0))),
        compose_salt(SECRET, "model", "alice", segments, nonce="alice"),
        compose_salt(SECRET, "model", "", segments, lora="alice"),
    ]
    assert len(set(salts)) == len(salts)


def test_the_three_kinds_of_salt_never_meet() -> None:
    same = (SECRET, "model", "alice")
    salts = {compose_salt(*same, ()), encode_salt(*same), text_salt(*same)}
    assert len(salts) == 3


def test_every_field_changes_the_salt_of_an_encode() -> None:
    salts = {
        encode_salt(SECRET, "model", "alice"),
        encode_salt(b"other", "model", "alice"),
        encode_salt(SECRET, "model2", "alice"),
        encode_salt(SECRET, "model", "bob"),
        encode_salt(SECRET, "model", "alice", lora="adapter"),
    }
    assert len(salts) == 5


def test_every_field_changes_the_salt_of_a_text() -> None:
    salts = {
        text_salt(SECRET, "model", "alice"),
        text_salt(b"other", "model", "alice"),
        text_salt(SECRET, "model2", "alice"),
        text_salt(SECRET, "model", "bob"),
        text_salt(SECRET, "model", "alice", nonce="n"),
    }
    assert len(salts) == 5


def test_a_salt_holds_nothing_that_vllm_refuses() -> None:
    for salt in (compose_salt(SECRET, "m/x", "a/b", ()), encode_salt(SECRET, "m/x", "a/b")):
        assert set(salt) <= set("0123456789abcdef")


# -- what is malformed ---------------------------------------------------------------------------------------

LONE = "\ud800"
TOO_LONG = "x" * (MAX_TEXT + 1)


@pytest.mark.parametrize("value", [None, [], "x", 7, True, [[]], 1.5, [NAME]], ids=repr)
def test_our_part_must_be_an_object(value: Any) -> None:
    assert refused({NAME: value})


@pytest.mark.parametrize(
    "value", [None, 7, True, [], {}, LONE, TOO_LONG, b"alice"], ids=lambda v: repr(v)[:20]
)
@pytest.mark.parametrize("field", ["owner", "token"])
def test_owner_and_token_must_be_text(field: str, value: Any) -> None:
    assert refused(body(**{field: value}))


@pytest.mark.parametrize(
    "op", [None, "", "Encode", "encode ", "delete", 7, True, [], ["encode"], {}], ids=repr
)
def test_what_is_asked_must_be_one_of_the_four(op: Any) -> None:
    assert refused(body(op=op), "op")


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [],
        {},
        "0,4",
        7,
        [0, 4],
        [[0]],
        [[0, 4, 5]],
        [["0", 4]],
        [[0, 4.0]],
        [[False, True]],
        [[0, math.nan]],
        [[-1, 4]],
        [[4, 4]],
        [[5, 4]],
        [[0, 4], [3, 6]],
        [[4, 6], [0, 2]],
        [[0, 4], [0, 4]],
        [[0, MAX_POSITION]],
        [[0, 10**30]],
        [[i, i + 1] for i in range(MAX_ITEMS + 1)],
        [{"start": 0, "stop": 4}],
        [{0: 0, 4: 4}],
    ],
    ids=lambda spans: repr(spans)[:40],
)
def test_spans_must_be_ordered_disjoint_and_not_empty(spans: Any) -> None:
    assert refused(body(op="encode", spans=spans), "spans")


@pytest.mark.parametrize(
    "segments",
    [
        None,
        {},
        "k",
        ["kk"],
        [["k"]],
        [["k", 1, 2]],
        [[7, 1]],
        [["k", 0]],
        [["k", -1]],
        [["k", True]],
        [["k", 1.0]],
        [["k", "1"]],
        [["k", MAX_POSITION]],
        [["k", 10**30]],
        [[LONE, 1]],
        [[TOO_LONG, 1]],
        [["k", None]],
        [["k", 1]] * (MAX_ITEMS + 1),
    ],
    ids=lambda segments: repr(segments)[:40],
)
def test_segments_must_be_keys_with_lengths(segments: Any) -> None:
    assert refused(body(op="inject", segments=segments), "segments")


@pytest.mark.parametrize(
    "mentions",
    [
        None,
        {},
        "t",
        [["t"]],
        [["t", -1]],
        [["t", True]],
        [["t", 1.5]],
        [[LONE, 1]],
        [[["t"], 1]],
        [["t", 2**31]],
    ],
    ids=repr,
)
@pytest.mark.parametrize("op", ["encode", "inject"])
def test_mentions_must_be_tags_with_positions(op: str, mentions: Any) -> None:
    assert refused(body(op=op, spans=[[0, 1]], mentions=mentions), "mentions")


@pytest.mark.parametrize(
    "values", [None, {}, "k", 7, [7], [None], [["k"]], [LONE], [TOO_LONG], [b"k"], ["k"] * 4097]
)
@pytest.mark.parametrize(("op", "field"), [("probe", "keys"), ("forget", "keys"), ("forget", "tags")])
def test_keys_and_tags_must_be_lists_of_text(op: str, field: str, values: Any) -> None:
    assert refused(body(op=op, **{field: values}), field)


@pytest.mark.parametrize("nonce", [None, 7, [], LONE, TOO_LONG], ids=lambda v: repr(v)[:20])
def test_a_nonce_must_be_text(nonce: Any) -> None:
    assert refused(body(op="inject", nonce=nonce), "nonce")


def test_a_refusal_repeats_nothing_of_what_was_sent() -> None:
    """It travels back and into logs."""
    answer = parse(body(op="private text", keys=["private text"]), SECRET)
    assert isinstance(answer, Refusal)
    assert "private" not in answer.reason


def anything(draw: random.Random, depth: int = 0) -> Any:
    """A random value: what JSON can carry, and some that only a caller in process can send."""
    if depth < 5 and draw.random() < 0.4:
        if draw.random() < 0.5:
            return [anything(draw, depth + 1) for _ in range(draw.randrange(4))]
        names = [
            "op",
            "owner",
            "token",
            "keys",
            "spans",
            "segments",
            "mentions",
            "tags",
            "nonce",
            NAME,
            "",
            LONE,
        ]
        return {draw.choice(names): anything(draw, depth + 1) for _ in range(draw.randrange(4))}
    numbers = [True, False, 0, 1, -1, 2**31, 2**63, 10**400, -(10**400), 0.5, math.nan, math.inf, -math.inf]
    texts = ["", "alice", "encode", LONE, "x" * 600, "\0", "爱", "1.2"]
    return draw.choice([None, *numbers, *texts, b"raw", (), (0, 1), ("k", 1), object(), {1, 2}])


def mutated(draw: random.Random) -> Any:
    """A right request with something in it replaced, dropped or nested deeper."""
    raw = params(draw.choice(ASKS), SECRET)
    ours = raw[NAME]
    for _ in range(draw.randrange(1, 4)):
        field = draw.choice(list(ours))
        match draw.randrange(5):
            case 0:
                ours.pop(field)
                ours.setdefault("op", "probe")
            case 1:
                ours[field] = anything(draw)
            case 2:
                ours[field] = [ours[field]]
            case 3 if isinstance(ours[field], list):
                ours[field] = [*ours[field], anything(draw)]
            case _ if isinstance(ours[field], list) and ours[field]:
                ours[field] = [anything(draw) if draw.random() < 0.5 else item for item in ours[field]]
    return raw


def valid(ask: Ask) -> bool:
    """What the scheduler side relies on."""
    owner = isinstance(ask.owner, str) and 0 < len(ask.owner) <= MAX_TEXT
    pairs = [*getattr(ask, "mentions", ()), *getattr(ask, "segments", ())]
    names = [*getattr(ask, "keys", ()), *getattr(ask, "tags", ()), *(name for name, _ in pairs)]
    spans = getattr(ask, "spans", ((0, 1),))
    edges = [edge for span in spans for edge in span]
    return (
        owner
        and hash(ask) is not None
        and all(isinstance(name, str) and len(name.encode()) <= 4 * MAX_TEXT for name in names)
        and all(type(n) is int and 0 <= n < MAX_POSITION for n in [*edges, *(at for _, at in pairs)])
        and all(tokens > 0 for _, tokens in getattr(ask, "segments", ()))
        and edges == sorted(edges)
        and all(start < stop for start, stop in spans)
        and len(spans) > 0
    )


@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_random_values_are_read_right_or_refused(seed: int) -> None:
    draw, read, refusals = random.Random(seed), 0, 0
    for count in range(2_000):
        raw = mutated(draw) if count % 2 else draw.choice([anything(draw), {NAME: anything(draw)}])
        answer = parse(raw, SECRET)
        if isinstance(answer, Refusal):
            refusals += 1
            assert answer.reason
        elif answer is not None:
            read += 1
            assert valid(answer), answer
    assert read > 20
    assert refusals > 500


def test_a_value_nested_a_hundred_thousand_deep_is_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for field in ("keys", "owner", "op", "token"):
        assert refused(body(**{field: deep}))
    for name in ("spans", "segments", "mentions"):
        assert refused(body(op="encode" if name == "spans" else "inject", **{name: deep}))
    assert parse(deep, SECRET) is None
    while deep:  # freed without recursion
        deep = deep[0]


def test_an_owner_with_half_a_character_is_refused_before_it_is_signed() -> None:
    assert refused(body(owner=LONE, token="9" * 10 + "." + "0" * 40))
    assert refused(body(token="9" * 10 + "." + LONE))


def test_a_dictionary_whose_keys_are_no_text_is_read_all_the_same() -> None:
    ours = body()[NAME] | {7: 7, None: None, (1, 2): []}
    assert parse({NAME: ours, 3: 3}, SECRET) == Probe("alice")


def test_every_reason_says_what_to_do_or_what_is_wrong() -> None:
    for raw in (body(op="x"), body(owner=7), body(token=""), {NAME: None}):
        answer = protocol.parse(raw, SECRET)
        assert isinstance(answer, Refusal)
        assert len(answer.reason) > 20
