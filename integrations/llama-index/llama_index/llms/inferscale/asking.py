"""From a call of LlamaIndex's to what a `Chat` is asked: whose memories, which options, which tools.

It must never ask for memories of a scope that the call does not name, nor guess one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from inferscale_memory import SamplingOptions
from inferscale_memory.arguments import as_count, as_mapping, as_plain, as_text, refusal
from inferscale_memory.deprecation import with_top_k
from llama_index.core.base.llms.types import ChatMessage

from llama_index.llms.inferscale.door import IDS, id_in, messages_in
from llama_index.llms.inferscale.messages import answerable, question_in, to_chat, to_tool_choice, to_tools
from llama_index.llms.inferscale.recollection import (
    Recollection,
    has_memories_as_text,
    recollection_in,
    without_memories,
)

_SAMPLING = tuple(field.name for field in fields(SamplingOptions))
_OTHERS = ("top_k", "k", "filters", "inject", "tools", "tool_choice", "tool_required")
OPTIONS = (*IDS, *_OTHERS, *_SAMPLING)


@dataclass(frozen=True, slots=True)
class Asked:
    """One call.

    Attributes:
        messages: as chat APIs take them, memories taken out.
        question: what to search for.
        ids: whose conversation it is; empty when nobody said.
        given: memories that came along; None where they are to be searched for.
        search_s: seconds it took to find `given`.
    """

    messages: list[dict[str, Any]]
    question: str
    ids: dict[str, str]
    given: Sequence[Mapping[str, Any]] | None
    search_s: float
    options: SamplingOptions
    top_k: int | None
    filters: dict[str, Any] | None
    inject: bool
    tools: list[Any] | None
    tool_choice: str | None

    @property
    def scoped(self) -> bool:
        return bool(self.ids)


def read(
    messages: Sequence[ChatMessage], memory: Any, defaults: Mapping[str, Any], given: Mapping[str, Any]
) -> Asked:
    """What `messages` ask of an LLM over `memory`.

    Args:
        memory: the `Memory` or `AsyncMemory`; None when there is none.
        defaults: the LLM's own options; `given`, the call's, win.

    Raises:
        TypeError: an option that does not exist.
        ConfigurationError: messages, ids or options that cannot be.
        ValueError: blocks that are no text, memories of another scope than the LLM's.
    """
    for name in given:
        if name not in OPTIONS:
            raise TypeError(
                f"InferScaleLLM has no option {name!r}: the options of a call are {', '.join(OPTIONS)}"
            )
    given = with_top_k(given)
    # An id that a call says is None is nobody's, whoever the LLM answers for otherwise.
    options = {
        **defaults,
        **{name: value for name, value in given.items() if value is not None or name in IDS},
    }
    messages = messages_in(messages)
    ids = {name: text for name in IDS if (text := id_in(options.get(name), name)) is not None}
    carried = recollection_in(messages)
    if carried is not None and memory is not None and carried.memory is memory:
        ids = _of_one_scope(carried, ids)
        carried.taken = True
        messages = without_memories(messages)
        found: Sequence[Mapping[str, Any]] | None = carried.results
        search_s = carried.search_s
    else:
        found, search_s = None, 0.0
        if memory is None or not ids or has_memories_as_text(messages):
            found = ()
    chat = to_chat(messages)
    question = question_in(chat)
    if found is None and not question:
        found = ()
    return Asked(
        messages=answerable(chat),
        question=question,
        ids=ids,
        given=found,
        search_s=search_s,
        options=_sampling(options),
        top_k=None if options.get("top_k") is None else as_count(options["top_k"], "top_k"),
        filters=None if options.get("filters") is None else as_mapping(options["filters"], "filters"),
        inject=bool(options.get("inject", True)),
        tools=to_tools(options.get("tools")),
        tool_choice=to_tool_choice(options.get("tool_choice"), bool(options.get("tool_required"))),
    )


def _sampling(options: Mapping[str, Any]) -> SamplingOptions:
    given = {name: options[name] for name in _SAMPLING if name in options}
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    elif (texts := given.get("stop")) is not None:
        if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
            raise refusal("stop", texts, "a text or a list of texts")
        given["stop"] = tuple(as_text(text, "stop") for text in texts)
    if given.get("json_schema") is not None:
        given["json_schema"] = as_plain(given["json_schema"], "json_schema")
    return SamplingOptions(**given)


def _of_one_scope(carried: Recollection, ids: Mapping[str, str]) -> dict[str, str]:
    for name, value in ids.items():
        if carried.ids.get(name) != value:
            raise ValueError(
                f"the memories in these messages are of {carried.ids}, and the LLM answers for {dict(ids)}: give the "
                "LLM no scope, or the same one as the memory"
            )
    return dict(carried.ids)
