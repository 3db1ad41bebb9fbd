"""What a turn recalled, on its way from a memory to whichever LLM answers.

A memory of LlamaIndex hands out messages and does not know who reads them. So its memories travel as a system message
that any LLM can read, and `InferScaleLLM` takes that message out and injects what it says. What is recalled is never
both: text in the prompt and keys and values in front of it.

The recollection is an object, never data of the message: it reaches no other LLM's service, is in no stored history,
and nobody can write one into a message that comes from outside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.bridge.pydantic import PrivateAttr

HEADING = "You remember the following from earlier conversations with the user:"
"""Stands above memories that go as text. `InferScaleLLM` recalls nothing of its own under it."""
_MARKUP = re.compile(r"<(?=\S)|\[(?=/?[A-Z_]+\])")
"""Where what may be a control token begins: `<|im_end|>`, `</s>`, `[INST]`. System texts are trusted, memories not."""


class Recollection:
    """What one question brought up.

    Attributes:
        memory: the `Memory` or `AsyncMemory` it comes from.
        ids: the scope that was asked for.
        results: as mem0's `search` returns them, best first.
        search_s: seconds for retrieval.
        taken: whether an LLM has taken it for injection.
    """

    def __init__(
        self, memory: Any, ids: Mapping[str, str], results: Sequence[Mapping[str, Any]], search_s: float = 0.0
    ) -> None:
        self.memory = memory
        self.ids = dict(ids)
        self.results = tuple(results)
        self.search_s = search_s
        self.taken = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Prompts are copied deeply while they are filled in; a memory with its engine is not copied."""
        return self

    @property
    def text(self) -> str:
        """The memories for an LLM that cannot inject them, the best first."""
        return "\n".join([HEADING, *(_line(result) for result in self.results)])


class RecollectionMessage(ChatMessage):
    """A message that carries a recollection.

    `spoken` says whether the message is there for the recollection's sake alone; otherwise it is somebody's words.
    """

    _recollection: Recollection | None = PrivateAttr(default=None)
    _spoken: bool = PrivateAttr(default=False)

    @property
    def recollection(self) -> Recollection | None:
        return self._recollection

    @property
    def spoken(self) -> bool:
        return self._spoken

    @classmethod
    def of(cls, recollection: Recollection, message: ChatMessage | None = None) -> Self:
        """The memories as a system message, or `message` with them on its back."""
        if message is None:
            carrier = cls(role=MessageRole.SYSTEM, blocks=[TextBlock(text=recollection.text)])
        else:
            carrier = cls(
                role=message.role,
                blocks=message.blocks,
                additional_kwargs=message.additional_kwargs,
            )
        carrier._recollection = recollection
        carrier._spoken = message is None
        return carrier

    def __getstate__(self) -> dict[Any, Any]:
        """What `pickle` writes: the message and its text, as JSON has them, without the recollection."""
        state = super().__getstate__()
        return {**state, "__pydantic_private__": {"_recollection": None, "_spoken": False}}

    def get_template_vars(self) -> list[str]:
        """None: what was said or remembered is no template, whatever braces are in it."""
        return []

    def format_vars(self, **kwargs: Any) -> Self:
        """Itself; see `get_template_vars`."""
        return self


def carry(messages: Sequence[ChatMessage], recollection: Recollection) -> list[ChatMessage]:
    """`messages` with a recollection: behind the system text, or, where nothing was recalled, unseen on the last
    message, so that an LLM still knows whose conversation it is."""
    carried = list(messages)
    if recollection.results:
        opening = 0
        while opening < len(carried) and carried[opening].role in (MessageRole.SYSTEM, MessageRole.DEVELOPER):
            opening += 1
        carried.insert(opening, RecollectionMessage.of(recollection))
    elif carried:
        carried[-1] = RecollectionMessage.of(recollection, carried[-1])
    return carried


def recollection_in(messages: Sequence[ChatMessage]) -> Recollection | None:
    """The one that `messages` carry, the last if there are several."""
    for message in reversed(messages):
        if isinstance(message, RecollectionMessage) and message.recollection is not None:
            return message.recollection
    return None


def without_memories(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """`messages` without those that are there for a recollection's sake alone."""
    return [
        message for message in messages if not (isinstance(message, RecollectionMessage) and message.spoken)
    ]


def own_words(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """`messages` without memories, as text or otherwise: what a history may keep. A memory in a history would outlive
    its being forgotten."""
    return [message for message in without_memories(messages) if not _says_memories(message)]


def has_memories_as_text(messages: Sequence[ChatMessage]) -> bool:
    """Whether memories stand in a system message, or in a question that quotes one, as condensing a history does."""
    return any(
        message.role in (MessageRole.SYSTEM, MessageRole.USER) and HEADING in (message.content or "")
        for message in messages
    )


def _says_memories(message: ChatMessage) -> bool:
    return message.role is MessageRole.SYSTEM and (message.content or "").startswith(HEADING)


def _line(result: Mapping[str, Any]) -> str:
    """A memory on one line, with its date, so that it can imitate neither a heading nor a turn; nor a control token,
    whatever model reads it."""
    metadata = result.get("metadata") or {}
    date = str(metadata.get("date") or result.get("created_at") or "")[:10]
    words = _MARKUP.sub(r"\g<0> ", " ".join(str(result.get("memory") or "").split()))
    return f"- [{date}] {words}" if date else f"- {words}"
