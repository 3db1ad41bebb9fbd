"""Every public call with arguments that cannot be: an error of ours or of the framework, that names what was wrong;
half an emoji in a text costs no conversation, and "*" is a name like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from inferscale_memory import Memory
from inferscale_memory.errors import InferScaleError
from llama_index.core.base.llms.types import TextBlock, ToolCallBlock
from llama_index.core.bridge.pydantic import ValidationError
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from tests.memory.watched import WatchedEngine

from llama_index.llms.inferscale import InferScaleLLM
from llama_index.llms.inferscale.recollection import recollection_in
from llama_index.memory.inferscale import InferScaleChatEngine, InferScaleContext, InferScaleMemory

ADA = {"user_id": "ada"}
HALF = "\ud83d"
QUESTION = "What is my cat called?"


def deep(levels: int = 5000) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for _ in range(levels):
        nested = {"a": nested}
    return nested


NOTHINGS: dict[str, Any] = {
    "nothing": None,
    "a number": 5,
    "a negative": -1,
    "a flag": True,
    "a fraction": 1.5,
    "no number": float("nan"),
    "empty": "",
    "blank": " ",
    "half an emoji": HALF,
    "bytes": b"x",
    "a list": [],
    "a list of nothing": [None],
    "a dictionary": {"a": 1},
    "an object": object(),
    "deep": deep(),
    "a text": "3",
}
CASES: dict[str, tuple[Callable[[Memory, Any], Any], str]] = {
    # what is called, and the values it takes
    "InferScaleLLM(memory)": (lambda m, v: InferScaleLLM(memory=v), "nothing"),
    "InferScaleLLM(user_id)": (
        lambda m, v: InferScaleLLM(user_id=v),
        "nothing, a number, a negative, a text",
    ),
    "InferScaleLLM(k)": (lambda m, v: InferScaleLLM(k=v), "nothing, a number, a flag, a text"),
    "InferScaleLLM(context_window)": (
        lambda m, v: InferScaleLLM(context_window=v),
        "nothing, a number, a flag, a text",
    ),
    "InferScaleMemory(client)": (lambda m, v: InferScaleMemory(v, ADA), "nothing"),
    "InferScaleMemory(context)": (lambda m, v: InferScaleMemory(m, v), ""),
    "InferScaleMemory(primary_memory)": (lambda m, v: InferScaleMemory(m, ADA, v), "nothing"),
    "InferScaleMemory(k)": (
        lambda m, v: InferScaleMemory(m, ADA, k=v),
        "nothing, a number, a flag, a text",
    ),
    "from_defaults(client)": (lambda m, v: InferScaleMemory.from_defaults(v, ADA), ""),
    "from_defaults(chat_history)": (
        lambda m, v: InferScaleMemory.from_defaults(m, ADA, v),
        "nothing, a list",
    ),
    "from_defaults(token_limit)": (
        lambda m, v: InferScaleMemory.from_defaults(m, ADA, token_limit=v),
        "nothing, a number",
    ),
    "from_config(context)": (lambda m, v: InferScaleMemory.from_config(v, {}), ""),
    "memory.client": (lambda m, v: setattr(InferScaleMemory(m, ADA), "client", v), ""),
    "memory.get": (
        lambda m, v: InferScaleMemory(m, ADA, infer=False).get(v),
        "nothing, empty, blank, half an emoji, a text",
    ),
    "memory.put": (lambda m, v: InferScaleMemory(m, ADA, infer=False).put(v), ""),
    "memory.put_messages": (lambda m, v: InferScaleMemory(m, ADA, infer=False).put_messages(v), "a list"),
    "memory.set": (lambda m, v: InferScaleMemory(m, ADA, infer=False).set(v), "a list"),
    "InferScaleContext(user_id)": (lambda m, v: InferScaleContext(user_id=v), "bytes, a text"),
    "InferScaleChatEngine(llm)": (lambda m, v: InferScaleChatEngine(v, InferScaleMemory(m, ADA)), ""),
    "InferScaleChatEngine(memory)": (lambda m, v: InferScaleChatEngine(InferScaleLLM(memory=m), v), ""),
    "engine.from_defaults(memory)": (lambda m, v: InferScaleChatEngine.from_defaults(v, **ADA), ""),
    "engine.from_defaults(llm)": (
        lambda m, v: InferScaleChatEngine.from_defaults(m, v, **ADA),
        "nothing",
    ),
    "engine.from_defaults(retriever)": (
        lambda m, v: InferScaleChatEngine.from_defaults(m, retriever=v, **ADA),
        "nothing",
    ),
    "engine.from_defaults(system_prompt)": (
        lambda m, v: InferScaleChatEngine.from_defaults(m, system_prompt=v, **ADA),
        "nothing, empty, blank, half an emoji, a text",
    ),
    "engine.from_defaults(prefix_messages)": (
        lambda m, v: InferScaleChatEngine.from_defaults(m, prefix_messages=v, **ADA),
        "nothing, a list",
    ),
    "engine.from_defaults(node_postprocessors)": (
        lambda m, v: InferScaleChatEngine.from_defaults(m, node_postprocessors=v, **ADA),
        "nothing, a list",
    ),
    "engine.from_defaults(user_id)": (
        lambda m, v: InferScaleChatEngine.from_defaults(m, user_id=v),
        "bytes, a text",
    ),
    "engine.chat": (lambda m, v: _engine(m).chat(v), "half an emoji, a text"),
    "engine.chat(chat_history)": (lambda m, v: _engine(m).chat(QUESTION, v), "nothing, a list"),
    "engine.chat(prev_chunks)": (lambda m, v: _engine(m).chat(QUESTION, None, v), "nothing, a list"),
    "llm.complete": (lambda m, v: _llm(m).complete(v), "half an emoji, a text"),
    "llm.chat": (lambda m, v: _llm(m).chat(v), ""),
    "llm.complete(user_id)": (
        lambda m, v: _llm(m).complete(QUESTION, user_id=v),
        "nothing, a number, a negative, a text",
    ),
    "llm.complete(k)": (lambda m, v: _llm(m).complete(QUESTION, k=v), "nothing, a number"),
    "llm.complete(stop)": (
        lambda m, v: _llm(m).complete(QUESTION, stop=v),
        "nothing, a list, blank, half an emoji, a text",
    ),
    "llm.complete(tools)": (lambda m, v: _llm(m).complete(QUESTION, tools=v), "nothing, a list"),
    "llm.complete(tool_choice)": (lambda m, v: _llm(m).complete(QUESTION, tool_choice=v), "nothing"),
    "llm.tokenize": (lambda m, v: _llm(m).tokenize(v), "empty, blank, half an emoji, a text"),
}
UNTOLD = {"llm.complete": ["deep"], "engine.chat": ["deep"], "llm.complete(stop)": ["empty"]}
"""Values that LlamaIndex's own observers fail on before anything of ours is called, or that the engines decide."""


def _llm(client: Memory) -> InferScaleLLM:
    return InferScaleLLM(memory=client, max_tokens=1, **ADA)


def _engine(client: Memory) -> InferScaleChatEngine:
    return InferScaleChatEngine(_llm(client), InferScaleMemory(client, ADA, infer=False))


def _kind(call: str) -> str:
    return call.split("(")[0].split(".")[0]


@pytest.mark.parametrize("kind", dict.fromkeys(_kind(call) for call in CASES))
def test_what_cannot_be_is_an_error_that_says_so(client: Memory, kind: str) -> None:
    wrong = []
    for call, (work, taken) in CASES.items():
        if _kind(call) != kind:
            continue
        for name, value in NOTHINGS.items():
            if name in UNTOLD.get(call, ()):
                continue
            refused = _refused(lambda work=work, value=value: work(client, value))
            if refused is (name in taken.split(", ")):
                wrong.append((call, name, "refused" if refused else "taken"))
    assert not wrong


def _refused(work: Callable[[], Any]) -> bool:
    """Whether `work` raises an error that says what is wrong. Any other error is the test's."""
    try:
        work()
    except (InferScaleError, ValidationError) as error:
        return bool(str(error).strip())
    except ValueError as error:  # mem0's own, and the frameworks'
        if type(error) is not ValueError or len(str(error)) < 10:
            raise
        return True
    return False


@pytest.mark.parametrize("buffer", [False, True], ids=["Memory", "ChatMemoryBuffer"])
def test_after_half_an_emoji_the_conversation_goes_on_and_is_remembered(client: Memory, buffer: bool) -> None:
    kept = ChatMemoryBuffer.from_defaults(token_limit=1000) if buffer else None
    memory = InferScaleMemory(client, ADA, kept, infer=False)
    call = ToolCallBlock(tool_call_id="1", tool_name="look", tool_kwargs={"at": HALF})
    memory.put(ChatMessage(role="user", content=f"I like tea {HALF}"))
    memory.put(ChatMessage(role="assistant", blocks=[TextBlock(text=HALF), call]))
    memory.put(ChatMessage(role="tool", content=HALF, additional_kwargs={"tool_call_id": "1", "extra": HALF}))
    memory.put(ChatMessage(role="assistant", content=f"So do I {HALF}"))
    history = memory.get(f"What do I like? {HALF}")
    assert "I like tea \ufffd" in [message.content for message in history]
    assert "I like tea \ufffd" in {fact["memory"] for fact in client.get_all(filters=ADA)["results"]}
    assert _llm(client).chat([*history, ChatMessage(role="user", content=f"Well {HALF}?")]).message.content


def test_a_message_that_is_whole_stays_the_same_object(client: Memory) -> None:
    memory = InferScaleMemory(client, ADA, ChatMemoryBuffer.from_defaults(token_limit=1000), infer=False)
    message = ChatMessage(role="user", content="Hello")
    memory.put(message)
    assert memory.get_all()[0] is message


def test_a_star_names_one_user_and_nobody_else(client: Memory, engine: WatchedEngine) -> None:
    client.add("I am called star", user_id="*", infer=False)
    star = {"user_id": "*"}
    llm = InferScaleLLM(memory=client, max_tokens=2, **star)
    assert [memory["text"] for memory in llm.complete("Who am I?").raw["memories"]] == ["I am called star"]
    memory = InferScaleMemory(client, star, infer=False)
    found = recollection_in(memory.get("Who am I?"))
    assert found is not None
    assert [result["memory"] for result in found.results] == ["I am called star"]
    chat = InferScaleChatEngine(InferScaleLLM(memory=client, max_tokens=2), memory)
    assert [node.text for node in chat.chat("Who am I?").source_nodes] == ["I am called star"]


def test_after_the_client_is_closed_every_call_says_that_it_is(client: Memory) -> None:
    llm, memory, chat = _llm(client), InferScaleMemory(client, ADA, infer=False), _engine(client)
    client.close()
    calls: list[Callable[[], Any]] = [
        lambda: llm.complete(QUESTION),
        lambda: list(llm.stream_complete(QUESTION)),
        lambda: llm.tokenize(QUESTION),
        lambda: llm.metadata,
        lambda: memory.get(QUESTION),
        lambda: chat.chat(QUESTION),
        lambda: chat.stream_chat(QUESTION),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()
    memory.put(ChatMessage(role="user", content=QUESTION))  # an answer is never lost: the history is kept
    assert [message.content for message in memory.get_all()] == [QUESTION]
