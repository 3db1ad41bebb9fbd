"""What somebody can do who has a valid token of an owner of his own, and not the secret: nothing to anybody else.

Real requests and the real block pool of vLLM, as in `simulation`.
"""

from __future__ import annotations

import gc
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale_memory.connector import protocol
from inferscale_memory.connector.protocol import (
    MAX_ITEMS,
    MAX_NAME,
    MAX_TEXT,
    NAME,
    Encode,
    Forget,
    Inject,
    Outcome,
)
from inferscale_memory.connector.scheduler import admission
from inferscale_memory.facts.scope import fact_tag, said_tag, turn_tag
from inferscale_memory.prompt.segments import PUBLIC_OWNER, Prompt, Segment
from tests.connector.simulation import Ids, Simulation, answer
from tests.kv.store_view import entries

VICTIM, MALLORY = "user:ada", "user:mallory"
REQUESTS = 10_000


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(autouse=True)
def small_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "ENCODE_SHARE", 1)


def words(count: int, seed: int) -> Ids:
    draw = random.Random(seed)
    return tuple(draw.randrange(8, 500) for _ in range(count))


class Victim:
    """Somebody's real traffic: facts encoded, injected, asked about, forgotten and encoded again."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.facts = [words(20, n) for n in range(4)]
        self.ids = tuple(token for fact in self.facts for token in fact)
        self.tags = [fact_tag(VICTIM, "f0"), fact_tag(VICTIM, "f1"), turn_tag(VICTIM, 7), said_tag(VICTIM)]
        self.mentions = tuple((tag, 20 * n) for n, tag in enumerate(self.tags))
        self.keys: list[str] = []
        self.salts: list[str] = []
        self.receipts: list[str] = []
        self.asked = self.injected = 0
        self.encode()

    def encode(self) -> None:
        spans = tuple((20 * n, 20 * n + 20) for n in range(4))
        name = self.begin_encode(spans)
        self.sim.drain()
        self.keys = [key for key, _ in self.sim.replies[name]["blobs"]]
        assert len(self.keys) == 4, self.sim.replies[name]

    def begin_encode(self, spans: tuple[tuple[int, int], ...]) -> str:
        return self.sim.add(self.ids, Encode(VICTIM, spans, self.mentions), tokens=2)

    def ask(self, serial: int) -> Callable[[], None]:
        """Begin a question; what is to be right about it when it has ended."""
        ids = self.ids + words(9, serial)
        segments = tuple((key, 20) for key in self.keys)
        inject = Inject(VICTIM, segments, f"nonce{serial}", self.mentions, f"receipt{serial}")
        self.salts.append(self.sim.salt(inject))
        self.receipts.append(inject.receipt)
        name = self.sim.add(ids, inject, tokens=4)

        def right() -> None:
            reply = self.sim.replies[name]
            self.asked += 1
            self.injected += reply["injected"]
            assert (reply["injected"], reply["refused"], reply["missing"]) == (80, None, [])
            assert tuple(self.sim.generated[name]) == answer(ids, 4)
            assert self.sim.ask(Outcome(VICTIM, inject.receipt))["outcome"] == reply
            assert self.sim.hittable(ids, self.sim.salt(inject)) >= 80

        return right


class Mallory:
    """Requests of every kind, with valid tokens of his own owner or none, and everything else guessed or seen."""

    def __init__(self, sim: Simulation, victim: Victim, seed: int) -> None:
        self.sim, self.victim, self.draw = sim, victim, random.Random(seed)
        self.token = protocol.sign_owner(sim.secret, MALLORY)  # an app's server gave it to him
        seen = protocol.params(Inject(MALLORY, (), "", ((fact_tag("agent:shared", "f"), 0),)), sim.secret)[
            NAME
        ]
        self.seen = seen  # a request that was made for him, with a fact in it that he shares with others
        self.shared = seen["mentions"][0][0]

    def tag(self) -> str:
        """A tag: as memory makes them, as they are on the wire, or made with a secret of his own."""
        draw, plain = self.draw, self.draw.choice(self.victim.tags)
        guessed = turn_tag(VICTIM, draw.randrange(1000))
        return draw.choice(
            [plain, guessed, self.shared, protocol.wire_tag(b"guess", plain), protocol.wire_tag(b"", plain)]
        )

    def key(self) -> str:
        return self.draw.choice([*self.victim.keys, f"{self.draw.getrandbits(160):040x}", "", "x" * MAX_NAME])

    def salt(self) -> str:
        draw, sim = self.draw, self.sim
        forged = [
            protocol.encode_salt(secret, sim.fingerprint, owner)
            for secret in (b"", b"guess")
            for owner in (VICTIM, MALLORY)
        ]
        return draw.choice([*forged, *self.victim.salts[-5:], "", f"salt{draw.random()}"])

    def request(self) -> tuple[Ids, dict[str, Any], str, int]:
        """(ids, parameters, salt, tokens)."""
        draw = self.draw
        owner = draw.choice([MALLORY] * 4 + [VICTIM, PUBLIC_OWNER, "agent:shared", ""])
        token = draw.choice([self.token] * 9 + ["", protocol.sign_owner(b"guess", owner)])
        some = draw.choice((1, 1, 3, 40))
        body: dict[str, Any] = {"op": draw.choice(("probe", "encode", "inject", "forget", "outcome"))}
        body |= {"owner": owner, "token": token}
        body |= {"keys": [self.key() for _ in range(some)]}
        tags = [self.tag() for _ in range(some)] if draw.random() < 0.7 else []
        ids = self.victim.ids + words(draw.randrange(1, 30), draw.randrange(50))
        if draw.random() < 0.3:
            ids = words(draw.randrange(2, 60), draw.randrange(50))
        if body["op"] == "forget":
            body |= {"tags": tags}
        if body["op"] in ("encode", "inject"):
            body |= {"mentions": [[tag, draw.randrange(len(ids))] for tag in tags], "nonce": self.nonce()}
        if body["op"] == "encode":
            cut = draw.randrange(1, len(ids))
            body |= {"spans": [[0, cut]] if cut < 2 else [[cut // 2, cut]]}
        if body["op"] in ("encode", "inject") and draw.random() < 0.8:
            body |= {"segments": [[self.key(), 20] for _ in range(draw.randrange(1, 5))]}
        if draw.random() < 0.3:  # what he has seen, for what he wants
            body |= {"seal": self.seen["seal"]}
            if body["op"] == "forget":
                body |= {"tags": [self.shared]}
        else:
            body |= {"seal": protocol.seal(b"guess", draw.choice(("forget", "mention")), owner, tags)}
        body |= {"receipt": draw.choice([*self.victim.receipts[-5:], "mine"])}
        if body["op"] in ("probe", "forget", "outcome"):
            ids = ids[:1]
        return ids, {NAME: body}, self.salt(), draw.choice((1, 2, 2, 5))

    def nonce(self) -> str:
        return self.draw.choice([f"nonce{len(self.victim.salts) - 1}", "", str(self.draw.random())])

    def nothing_was_got(self, name: str) -> None:
        """The reply tells nothing of anybody else's, and says of nothing that it was done."""
        reply = self.sim.replies.get(name, {})
        assert not reply.get("at_hand"), reply
        assert not reply.get("dropped"), reply
        assert not reply.get("blobs"), reply
        assert not reply.get("injected"), reply
        outcome = reply.get("outcome")
        assert outcome is None or not outcome["injected"], reply


def test_ten_thousand_requests_with_a_valid_token_and_no_secret_do_nothing_to_anybody_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mixed into somebody's real traffic, of which an encode is always under way while they come."""
    sim = Simulation(folder, blocks=1024, batch=512, device=400, host=400)
    shared = words(40, 99)  # an agent's fact that stands as text in prompts of its users
    mention = Inject(VICTIM, (), "shared", ((fact_tag("agent:shared", "f"), 0),))
    sim.ask(mention, shared)
    victim = Victim(sim)
    mallory = Mallory(sim, victim, seed=1)
    kept, encodes, sent = set(victim.keys), 0, 0
    ops: dict[str, int] = {}
    while sent < REQUESTS:
        sim.ask(mention, shared)  # now and then, or vLLM evicts it as the block used longest ago
        right = victim.ask(sent)
        running = victim.begin_encode(((0, 20), (20, 60)))
        names = []
        for _ in range(50):
            ids, raw, salt, tokens = mallory.request()
            names.append(sim.add(ids, raw=raw, salt=salt, tokens=tokens))
            ops[raw[NAME]["op"]] = ops.get(raw[NAME]["op"], 0) + 1
            sent += 1
        sim.drain()
        right()
        encodes += 1
        assert sim.replies[running]["error"] is None, "his requests ended an encode"
        for name in names:
            mallory.nothing_was_got(name)
        kept |= {key for key, _ in sim.replies[running]["blobs"]}
        stored = entries(sim.store)
        assert {entry.key for entry in stored} <= kept, "an attacker has stored something"
        assert set(victim.keys) <= {entry.key for entry in stored}, "an attacker has dropped something"
        assert {entry.owner for entry in stored} == {VICTIM}
        assert sim.hittable(shared, sim.salt(mention)) == 32, "he has evicted what is shared"
        for name in [*names, running]:
            for mapping in (sim.requests, sim.replies, sim.generated):
                mapping.pop(name, None)
    index = sim.side.forgetter.index
    assert index is not None
    assert not {name for name in index._first if name[0] == MALLORY}, "the attacker's names are remembered"
    # And the owner herself can do all of it.
    assert sim.ask(Forget(VICTIM, tuple(victim.keys), tuple(victim.tags)))["dropped"] == 4
    assert sim.hittable(victim.ids, victim.salts[-1]) == 0
    with capsys.disabled():
        print(
            f"\n{sent} hostile requests ({', '.join(f'{count} {op}' for op, count in sorted(ops.items()))}): "
            f"0 of {encodes} encodes ended, 0 of {victim.asked} injections changed, 0 blobs read"
        )


# -- what they cost ---


def largest(op: str, token: str, count: int = MAX_ITEMS) -> tuple[int, dict[str, Any]]:
    """(tokens of the prompt, parameters): as much as can be in a request of this kind."""
    name = "k" * (MAX_NAME - 4)
    names = [f"{name}{n:04d}" for n in range(count)]
    body: dict[str, Any] = {"op": op, "owner": MALLORY, "token": token, "nonce": "n" * MAX_TEXT}
    body |= {"seal": "0" * 40, "receipt": "r" * MAX_TEXT}
    match op:
        case "probe":
            return 1, {NAME: body | {"keys": names}}
        case "forget":
            return 1, {NAME: body | {"keys": names}}
        case "forget tags":
            return 1, {NAME: body | {"op": "forget", "keys": names, "tags": names}}
        case "inject":
            return 3 * count, {NAME: body | {"segments": [[name, 1] for name in names]}}
        case "inject mentions":
            pairs = [[name, 1] for name in names]
            return 3 * count, {NAME: body | {"op": "inject", "segments": pairs, "mentions": pairs}}
        case "encode spans":
            spans = [[2 * n, 2 * n + 1] for n in range(count)]
            return 3 * count, {NAME: body | {"op": "encode", "spans": spans}}
        case "encode":
            segments = [[name, 1] for name in names[: count // 2]]
            spans = [[count + 2 * n, count + 2 * n + 1] for n in range(count // 2)]
            return 3 * count, {NAME: body | {"spans": spans, "segments": segments}}
        case "outcome":
            return 1, {NAME: body}
    raise AssertionError(op)


OPS = ["probe", "forget", "forget tags", "inject", "inject mentions", "encode", "encode spans", "outcome"]


def test_a_thousand_of_the_largest_requests_stall_nobody_and_leave_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time of the scheduler's thread, by its own clock: on a busy machine the time on the wall says nothing."""
    sim = Simulation(folder, blocks=1024, batch=512, device=400)
    victim = Victim(sim)
    right = victim.ask(0)  # a request under way, with names to be searched
    token = protocol.sign_owner(sim.secret, MALLORY)
    requests = []
    for op in OPS:
        tokens, raw = largest(op, token)
        requests.append((op, words(tokens, 1), raw))
    spent: dict[str, list[float]] = {}

    def send(count: int) -> None:
        for number in range(count):
            op, ids, raw = requests[number % len(requests)]
            request = sim._request(f"hostile{number}", ids[:2], "salt", raw, 1)
            request.prompt_token_ids, request.num_prompt_tokens = list(ids), len(ids)
            began = time.thread_time()
            sim.side.arrived(request)
            sim.side.match(request, 0)
            arrived = time.thread_time()
            sim.side.build({}, lambda name: [])
            sim.side.finished(request)
            spent.setdefault(op, []).append(max(arrived - began, time.thread_time() - arrived))

    send(200)
    spent.clear()
    gc.collect()
    gc.freeze()  # as vLLM's engine does: a collection goes over what came since
    before = resident()
    try:
        send(1000)
    finally:
        gc.unfreeze()
    gc.collect()
    grown = resident() - before
    sim.drain()
    right()
    with capsys.disabled():
        times = ", ".join(
            f"{op} {1e3 * median(took):.2f}/{1e3 * max(took):.2f}" for op, took in spent.items()
        )
        print(
            f"\nmedian/worst ms on the scheduler's thread: {times}; resident memory grew by {grown / 1e6:.2f} MB"
        )
    assert max(map(max, spent.values())) < 0.005
    assert grown < 5e6
    side = sim.side
    assert side.forgetter.index is not None
    assert len(side.requests) == len(side.forgetter.running) == len(side.injector.loading) == 0
    assert {owner for owner, _ in side.forgetter.index._first} <= {"", VICTIM}, (
        "what was refused is remembered"
    )


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


# -- in a real engine ---


@pytest.mark.engine
def test_against_a_real_engine_they_do_nothing_either(tmp_path: Path) -> None:
    """Two hundred of them in one batch with a victim's encode and question."""
    from tests.connector.rig import Rig
    from tests.models import tiny_model

    with Rig.open(tiny_model("llama", tmp_path / "llama"), num_gpu_blocks_override=1024) as rig:
        facts = [words(20, n) for n in range(4)]
        tags = [fact_tag(VICTIM, "f0"), fact_tag(VICTIM, "f1"), turn_tag(VICTIM, 7), said_tag(VICTIM)]
        head, *told = rig.remember(VICTIM, facts, words(17, 50), tags=tags)
        prompt = Prompt(VICTIM, (head, *told, Segment(words(9, 51)))).salted("victim")
        ids = tuple(prompt.ids)
        plain, asked = rig.plain(ids), rig.inject(prompt)
        assert asked.injected == 97
        request, sampling = rig.injection(prompt)
        keys = [part.key for part in told]
        victim: Any = SimpleNamespace(
            ids=ids, keys=keys, tags=tags, salts=[request[1]], receipts=["r"], facts=facts
        )
        engine: Any = SimpleNamespace(secret=rig._secret, fingerprint=rig.fingerprint, replies={})
        mallory = Mallory(engine, victim, seed=2)
        requests, samplings = [], []
        for _ in range(200):
            theirs, raw, salt, tokens = mallory.request()
            requests.append((theirs, salt or "none"))
            hostile = rig.sampling(tokens)
            hostile.extra_args = {"kv_transfer_params": raw}
            samplings.append(hostile)
        encode = Encode(VICTIM, ((30, 60),), ((tags[0], 30),))
        own = protocol.encode_salt(rig._secret, rig.fingerprint, VICTIM)
        requests[100:100] = [request, (ids, own)]
        samplings[100:100] = [sampling, rig.sampling(2, encode)]
        answers = rig.run(requests, samplings)
        mine, encoded = answers[100:102]
        del answers[100:102]
        assert mine.tokens == plain.tokens
        assert mine.differs(plain) < 1e-4
        assert encoded.reply["error"] is None
        for number, answer in enumerate(answers):
            engine.replies[str(number)] = answer.reply
            mallory.nothing_was_got(str(number))
        assert rig.at_hand(VICTIM, keys) == set(keys)
        again = rig.inject(prompt)
        assert again.known >= 96, "its cached blocks were evicted"
        assert again.differs(plain) < 1e-4
