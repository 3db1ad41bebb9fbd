"""Tools that go with a question: what they ask of the engine, and what they make of its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from inferscale_memory.engine.base import Engine, SamplingOptions
from inferscale_memory.errors import PromptError
from inferscale_memory.prompt.calls import (
    CallReader,
    Said,
    call_schema,
    forced,
    read_calls,
    read_forced,
    words_of_call,
)
from inferscale_memory.prompt.tools import read_tools


@dataclass(frozen=True, slots=True)
class Calling:
    """Tools a model may call, or must.

    Attributes:
        tools: in the form of chat APIs.
        forced: names of those one of which must be called; empty where the model may choose.
        reader: the engine's own reader of calls; None where they are JSON.
    """

    tools: tuple[Mapping[str, Any], ...]
    forced: tuple[str, ...] = ()
    reader: CallReader | None = None

    @classmethod
    def read(cls, engine: Engine, tools: Sequence[Any] | None, choice: str | None) -> Self | None:
        """None without tools, or where none is to be called. Raises PromptError on what is no tool, and on a
        choice that does not exist."""
        offered = read_tools(tools)
        names = forced(offered, choice)
        if not offered or choice == "none":
            return None
        return cls(tuple(offered), names, getattr(engine, "call_reader", None))

    def options(self, options: SamplingOptions) -> SamplingOptions:
        """`options` under which a forced call is certain, and any call is to be seen."""
        if self.forced:
            if options.json_schema is not None:
                raise PromptError("A forced tool call has a JSON schema of its own: leave out json_schema.")
            return replace(options, json_schema=call_schema(self.tools, self.forced))
        return replace(options, special_tokens=self.reader is not None)

    def said(self, text: str) -> Said:
        """The words and the calls of an answer."""
        if self.forced:
            return read_forced(text, self.tools)
        return (self.reader or read_calls)(text, self.tools)

    def certain(self, text: str) -> int:
        """How many characters of a growing answer are words, whatever follows."""
        return 0 if self.forced or self.reader is not None else words_of_call(text)
