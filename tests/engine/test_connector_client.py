"""What is asked of a connector, and what is made of its answers, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from inferscale_memory.connector import protocol
from inferscale_memory.connector.protocol import Encode, Forget, Inject, Probe
from inferscale_memory.engine.base import EncodeRequest, Span
from inferscale_memory.engine.connector_client import Asking, completion
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


class Asked(Asking):
    """A connector that answers encodes of the owners it knows, and fails for the others."""

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


class Listening(Asked):
    """A connector that has every blob; it reads what it is asked as the real one does."""

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


def encode(asked: Asked, *owners: str) -> list[Any]:
    requests = [EncodeRequest(owner, (1, 2, 3), (Span(1, 3),)) for owner in owners]
    return asyncio.run(asked.encode(requests))


def transfer(asked: Asked, prompt: Prompt = PROMPT) -> tuple[int, Any, str]:
    asks, params, salt = asked._transfer(prompt)
    return asks, protocol.parse(params, SECRET), salt


def test_an_encode_that_is_not_answered_takes_no_other_blob_with_it() -> None:
    one, other, third = encode(Asked("ada", "cleo"), "ada", "ben", "cleo")
    assert [ref.key for result in (one, third) for ref in result.refs] == ["blob of ada", "blob of cleo"]
    assert (other.refs, other.error, other.answered) == ((), "nobody answered for ben", False)


def test_an_engine_that_answers_nobody_is_an_error() -> None:
    with pytest.raises(EngineError, match="for ada"):
        encode(Asked(), "ada", "ben")


def test_a_prompt_names_its_facts_whatever_is_injected() -> None:
    asks, ask, salt = transfer(Asked())
    assert isinstance(ask, Inject)
    assert (asks, ask.segments) == (5, (("preamble", 2), ("blob", 3)))
    assert ask.mentions == ((protocol.wire_tag(SECRET, "tag"), 2), (protocol.wire_tag(SECRET, "said"), 5))
    unable = Asked()
    unable.unsupported = "it has MLA attention"
    asks, text, other = transfer(unable)
    assert isinstance(text, Inject)
    assert (asks, text.segments) == (0, ())
    assert text.mentions == ask.mentions
    assert other != salt


def test_what_is_asked_of_thousands_of_blobs_is_asked_in_parts() -> None:
    """A connector refuses a request of more than 4,096."""
    keys, tags = [f"{n:040x}" for n in range(10_000)], [f"t{n}" for n in range(9_000)]
    asked = Listening()
    assert asyncio.run(asked.at_hand("ada", keys)) == set(keys)
    assert asyncio.run(asked.forget("ada", keys, tags)) == 10_000
    forgets = [ask for ask in asked.read if isinstance(ask, Forget)]
    assert [key for ask in forgets for key in ask.keys] == keys
    assert [tag for ask in forgets for tag in ask.tags] == [protocol.wire_tag(SECRET, tag) for tag in tags]
    assert len(asked.read) == 3 + 3 + 3


def test_an_encode_of_more_than_one_request_takes_says_so_and_is_not_sent() -> None:
    asked = Listening()
    ids = tuple(range(5000))
    spans = tuple(Span(n, n + 1) for n in range(5000))
    for request in (
        EncodeRequest("ada", ids, spans),
        EncodeRequest("ada", ids[:3], spans[:1], tuple((f"t{n}", 0) for n in range(4))),
    ):
        [result] = asyncio.run(asked.encode([request]))
        assert "in one encode" in str(result.error)
    assert asked.read == []


def test_a_prompt_of_more_memories_than_a_request_can_name_is_refused() -> None:
    segments = tuple(Segment((1,), None, f"t{n}") for n in range(4097))
    with pytest.raises(PromptError, match="recall less"):
        transfer(Asked(), Prompt("user:ada", segments))
    assert len(transfer(Asked(), Prompt("user:ada", segments[:4096]))[1].mentions) == 4096


def test_where_no_connector_is_nothing_is_asked_of_it() -> None:
    alone = Asked()
    alone.unsupported, alone.connected = "there is none", False
    assert transfer(alone)[:2] == (0, None)
    assert transfer(Asked(), Prompt("user:ada", (Segment((1,)),)))[:2] == (0, None)


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


def test_an_owner_of_any_length_can_be_named_to_the_connector() -> None:
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
