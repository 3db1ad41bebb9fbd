"""The requests that a client sends to the connector and how it reads the replies, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from inferscale_memory.connector import protocol
from inferscale_memory.connector.protocol import Encode, Forget, Inject, Probe
from inferscale_memory.engine.base import EncodeRequest, Span
from inferscale_memory.engine.connector_client import ConnectorClient, completion
from inferscale_memory.errors import EngineError, PromptError
from inferscale_memory.facts import scope
from inferscale_memory.facts.scope import Scope
from inferscale_memory.prompt import Prompt, Segment

SECRET = b"of the test"
PROMPT = Prompt(
    "user:ada",
    (
        Segment((1, 2), "preamble"),
        Segment((3, 4, 5), "blob", "tag"),
        Segment((6,), None, "said"),
        Segment((7,)),
    ),
)


class FakeClient(ConnectorClient):
    """Answers encodes of the owners it knows, and fails for all others."""

    fingerprint = "model"
    max_model_len = 100
    some_token = 9

    def __init__(self, *known: str) -> None:
        super().__init__(SECRET)
        self._known = known

    async def _control(
        self, ask: protocol.Ask, ids: Sequence[int], salt: str, *, tokens: int = 1
    ) -> dict[str, Any]:
        assert isinstance(ask, Encode)
        if ask.owner not in self._known:
            raise EngineError(f"nobody answered for {ask.owner}\nat all")
        return {"blobs": [[f"blob of {ask.owner}", 2]]}

    async def _all(self, calls: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> list[Any]:
        return list(await asyncio.gather(*(call() for call in calls)))


class RecordingClient(FakeClient):
    """Holds every blob, and records each request after parsing it as the real connector does."""

    max_model_len = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    async def _control(
        self, ask: protocol.Ask, ids: Sequence[int], salt: str, *, tokens: int = 1
    ) -> dict[str, Any]:
        read = protocol.parse(protocol.params(ask, SECRET), SECRET)
        self.read.append(read)
        match read:
            case Probe(keys=keys):
                return {"at_hand": list(keys)}
            case Forget(keys=keys):
                return {"dropped": len(keys)}
        raise AssertionError(read)


def encode(client: FakeClient, *owners: str) -> list[Any]:
    requests = [EncodeRequest(owner, (1, 2, 3), (Span(1, 3),)) for owner in owners]
    return asyncio.run(client.encode(requests))


def transfer(client: FakeClient, prompt: Prompt = PROMPT) -> tuple[int, Any, str]:
    asks, params, salt = client._transfer(prompt)
    return asks, protocol.parse(params, SECRET), salt


def test_an_encode_that_fails_does_not_lose_the_blobs_of_the_others() -> None:
    one, other, third = encode(FakeClient("ada", "cleo"), "ada", "ben", "cleo")
    assert [ref.key for result in (one, third) for ref in result.refs] == ["blob of ada", "blob of cleo"]
    assert (other.refs, other.error, other.answered) == ((), "nobody answered for ben", False)


def test_an_error_is_raised_when_every_encode_fails() -> None:
    with pytest.raises(EngineError, match="for ada"):
        encode(FakeClient(), "ada", "ben")


def test_a_prompt_mentions_its_facts_even_when_nothing_is_injected() -> None:
    asks, ask, salt = transfer(FakeClient())
    assert isinstance(ask, Inject)
    assert (asks, ask.segments) == (5, (("preamble", 2), ("blob", 3)))
    assert ask.mentions == ((protocol.wire_tag(SECRET, "tag"), 2), (protocol.wire_tag(SECRET, "said"), 5))
    unable = FakeClient()
    unable.unsupported = "it has MLA attention"
    asks, text, other = transfer(unable)
    assert isinstance(text, Inject)
    assert (asks, text.segments) == (0, ())
    assert text.mentions == ask.mentions
    assert other != salt


def test_a_probe_or_forget_of_thousands_of_keys_is_sent_in_parts() -> None:
    """The connector refuses a request of more than 4,096 items."""
    keys, tags = [f"{n:040x}" for n in range(10_000)], [f"t{n}" for n in range(9_000)]
    client = RecordingClient()
    assert asyncio.run(client.at_hand("ada", keys)) == set(keys)
    assert asyncio.run(client.forget("ada", keys, tags)) == 10_000
    forgets = [ask for ask in client.read if isinstance(ask, Forget)]
    assert [key for ask in forgets for key in ask.keys] == keys
    assert [tag for ask in forgets for tag in ask.tags] == [protocol.wire_tag(SECRET, tag) for tag in tags]
    assert len(client.read) == 3 + 3 + 3


def test_an_encode_over_the_limit_of_a_request_is_refused_and_not_sent() -> None:
    client = RecordingClient()
    ids = tuple(range(5000))
    spans = tuple(Span(n, n + 1) for n in range(5000))
    for request in (
        EncodeRequest("ada", ids, spans),
        EncodeRequest("ada", ids[:3], spans[:1], tuple((f"t{n}", 0) for n in range(4))),
    ):
        [result] = asyncio.run(client.encode([request]))
        assert "in one encode" in str(result.error)
    assert client.read == []


def test_a_prompt_with_more_memories_than_a_request_can_mention_is_refused() -> None:
    segments = tuple(Segment((1,), None, f"t{n}") for n in range(4097))
    with pytest.raises(PromptError, match="recall less"):
        transfer(FakeClient(), Prompt("user:ada", segments))
    assert len(transfer(FakeClient(), Prompt("user:ada", segments[:4096]))[1].mentions) == 4096


def test_without_a_connector_a_prompt_has_no_parameters_for_it() -> None:
    alone = FakeClient()
    alone.unsupported, alone.connected = "there is none", False
    assert transfer(alone)[:2] == (0, None)
    assert transfer(FakeClient(), Prompt("user:ada", (Segment((1,)),)))[:2] == (0, None)


def test_tokens_whose_load_failed_count_as_prefilled() -> None:
    done = completion(
        text="",
        token_ids=(),
        finish_reason="stop",
        prompt_tokens=100,
        asked=80,
        known=80,
        reply={"injected": 0, "lost": 80, "refused": "loading failed"},
        ttft_s=0.0,
        logprobs=None,
    )
    assert (done.injected_tokens, done.cached_tokens, done.prefilled_tokens) == (0, 0, 100)
    assert done.refused == "loading failed"


def test_an_owner_of_any_length_fits_a_request() -> None:
    long, longer = Scope(user_id="x" * 508), Scope(user_id="x" * 509)
    assert Scope(user_id="x" * 507).owner == "user:" + "x" * 507
    assert len({long.owner, longer.owner, Scope(agent_id="x" * 508).owner}) == 3
    assert scope.MOST <= protocol.MAX_TEXT
    for one in (long, longer):
        assert len(one.owner) <= protocol.MAX_TEXT
        asked = protocol.parse(protocol.params(protocol.Probe(one.owner), SECRET), SECRET)
        assert asked == protocol.Probe(one.owner)
    digest = long.owner.removeprefix("user#")
    assert Scope(user_id=digest).owner != long.owner
