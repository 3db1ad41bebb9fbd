"""What is asked of a connector, and what is made of its answers, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from inferscale_memory.connector import protocol
from inferscale_memory.connector.protocol import Encode, Inject
from inferscale_memory.engine.asking import Asking, completion
from inferscale_memory.engine.base import EncodeRequest, Span
from inferscale_memory.errors import EngineError
from inferscale_memory.memory import scope
from inferscale_memory.memory.scope import Scope
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
    assert ask.mentions == (("tag", 2), ("said", 5))
    unable = Asked()
    unable.unsupported = "it has MLA attention"
    asks, text, other = transfer(unable)
    assert isinstance(text, Inject)
    assert (asks, text.segments) == (0, ())
    assert text.mentions == ask.mentions
    assert other != salt


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
