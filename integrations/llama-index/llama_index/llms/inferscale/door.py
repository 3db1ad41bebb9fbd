"""What LlamaIndex's calls may be given, read before anything is searched for, asked or written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from inferscale_memory.arguments import as_id, as_plain, refusal
from llama_index.core.base.llms.types import ChatMessage

IDS = ("user_id", "agent_id", "run_id")


def messages_in(given: Any, name: str = "messages") -> list[ChatMessage]:
    """Messages of LlamaIndex's, with all text in them whole: half an emoji becomes U+FFFD, which every store and
    tokenizer takes. A message that is whole stays the same object. Raises ConfigurationError on anything else."""
    if isinstance(given, str | bytes | Mapping | ChatMessage) or not isinstance(given, Iterable):
        raise refusal(name, given, "a list of ChatMessages")
    return [message_in(message) for message in given]


def message_in(given: Any) -> ChatMessage:
    """See `messages_in`."""
    if not isinstance(given, ChatMessage):
        raise refusal("a message", given, "a ChatMessage of LlamaIndex's")
    arguments = as_plain(given.additional_kwargs, "additional_kwargs of a message")
    blocks = [_block(block) for block in given.blocks]
    if arguments == given.additional_kwargs and all(map(_same, blocks, given.blocks)):
        return given
    return given.model_copy(update={"blocks": blocks, "additional_kwargs": arguments})


def id_in(value: Any, name: str) -> str | None:
    """The text of an id; None for none. Raises ConfigurationError on an empty one, and on what is no id."""
    if value is None:
        return None
    text = as_id(value, name).strip()
    if not text:
        raise refusal(
            name, value, "an id that is more than whitespace: name whose memories are meant, or leave it out"
        )
    return text


def _block(block: Any) -> Any:
    """A block whose texts and arguments are whole."""
    told = {
        name: getattr(block, name) for name in ("text", "tool_kwargs", "tool_name") if hasattr(block, name)
    }
    whole = as_plain(told, "a message")
    return block if whole == told else block.model_copy(update=whole)


def _same(one: Any, other: Any) -> bool:
    return one is other
