"""Copies of what is open share it, pickles of it are refused in one sentence, and plain values travel whole."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest

from inferscale_memory import CopyError, Injection, SamplingOptions
from inferscale_memory.engine.remote import RemoteEngine
from inferscale_memory.engine.transformers import TransformersEngine
from inferscale_memory.engine.vllm import VLLMEngine
from inferscale_memory.memory import Chat, Memory
from tests.memory.faces import Settled
from tests.memory.saying import ADA, say


def assert_shared(thing: Any) -> None:
    assert copy.copy(thing) is thing
    assert copy.deepcopy({"in": [thing]})["in"][0] is thing
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(CopyError, match=r"cannot be pickled: pass its configuration"):
            pickle.dumps(thing, protocol)


def test_a_memory_of_either_face_is_shared_by_its_copies(either: Settled) -> None:
    assert_shared(either.itself)
    assert_shared(either.vector_store)
    assert either.add("I like tea", **ADA, infer=False)["results"], "the original goes on"


@pytest.mark.parametrize("kind", [TransformersEngine, VLLMEngine, RemoteEngine])
def test_an_engine_is_shared_by_its_copies(model: Path, kind: Any) -> None:
    with kind("http://127.0.0.1:1") if kind is RemoteEngine else kind(model) as engine:
        assert_shared(engine)


def test_a_chat_is_shared_by_its_copies(memory: Memory) -> None:
    assert_shared(Chat(memory=memory))
    assert_shared(Chat())


def test_a_memory_is_not_handed_to_a_spawned_process(memory: Memory) -> None:
    process = multiprocessing.get_context("spawn").Process(target=print, args=(memory,))
    with pytest.raises(CopyError, match="open a memory from it in the process that is to use it"):
        process.start()


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copied_conversation_goes_on_by_itself(memory: Memory, how: Any) -> None:
    say(memory, "I like tea")
    short = SamplingOptions(max_tokens=2)
    talk = memory.session(**ADA)
    talk.chat("What do I like?", options=short)
    other = how(talk)
    other.chat("And what else?", options=short)
    assert len(talk.messages) == 2
    assert len(other.messages) == 4
    assert other.messages[:2] == talk.messages
    talk.chat("Do I like coffee?", options=short)
    assert len(other.messages) == 4
    with pytest.raises(CopyError, match="cannot be pickled"):
        pickle.dumps(talk)


def test_values_travel_whole(memory: Memory) -> None:
    say(memory, "I like tea")
    memory.flush()
    prepared = memory.prepare("What do I like?", **ADA)
    reply = memory.chat("What do I like?", **ADA, options=SamplingOptions(logprobs=2), max_tokens=2)
    options = SamplingOptions(max_tokens=3, stop=("\n",), json_schema={"type": "object"})
    for value in (Injection(top_k=3, context_turns=8), options, prepared, reply, *reply.memories, reply.completion):
        assert pickle.loads(pickle.dumps(value)) == value
        assert copy.deepcopy(value) == value
