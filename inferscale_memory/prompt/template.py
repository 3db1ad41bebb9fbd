"""Splits a conversation into what stands before the facts and what stands behind them.

The chat template is rendered once, with a mark where the facts go, and cut there. The two halves and every
fact are tokenized on their own and never merged, so a fact has the same ids wherever it stands. Words of the
conversation must never get into the preamble, which may be shared between owners.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from inferscale_memory.arguments import as_plain, repaired
from inferscale_memory.errors import PromptError
from inferscale_memory.prompt.control import ControlTokens
from inferscale_memory.prompt.tools import introduction, read_tools, spelled_out, with_read_arguments

DEFAULT_SYSTEM = "You are a helpful assistant."
DEFAULT_HEADING = "You remember the following from earlier conversations:\n"

Message = Mapping[str, Any]
"""A message as chat APIs write it: `role`, `content` (text, or a list of text parts), and whatever else the
template reads."""

BASE_MODEL_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content or '' }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Stands in where the tokenizer has no chat template (base models)."""

_SYSTEM_ROLES = ("system", "developer")
_ANSWERED_ROLES = ("user", "tool")
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
_ENCODE_DAY = datetime(2025, 1, 1)


@dataclass(frozen=True, slots=True)
class Frame:
    """A conversation as token ids, open where its facts go.

    Attributes:
        preamble: everything before the first fact: BOS, system text, heading (and tools, where the template
            writes them first). Never a word of the conversation.
        suffix: everything behind the last fact: rest of the system turn, tools, history, question, and the
            opening of the answer.
        system: the app's own text in front: its system text, or the default one with its tools; None when it brought
            neither.
    """

    preamble: tuple[int, ...]
    suffix: tuple[int, ...]
    system: str | None


class PromptTemplate:
    """A model's chat template, with a place for facts at the end of the system text.

    Where the template has no system role, or writes the system text behind the history (Mistral), system text
    and facts stand at the head of the first user message. There always is a system text, so that a template
    never adds one of its own. Control tokens spelled in facts and in messages of users and tools are defused;
    system text and the model's own answers are trusted. BOS stands once, in front, where the template writes
    it or the tokenizer would add it; whatever else the template writes stays as it is.

    Attributes:
        encode_preamble: what every fact is encoded behind: default system text and heading, the same for all
            apps, owners and days.
    """

    def __init__(
        self, tokenizer: Any, *, heading: str = DEFAULT_HEADING, default_system: str = DEFAULT_SYSTEM
    ) -> None:
        """Raises PromptError when the tokenizer's chat template cannot be split.

        Args:
            tokenizer: the model's `transformers` tokenizer.
            heading: stands above the facts, on a line of its own.
            default_system: system text of conversations that bring none; may be empty.
        """
        if not heading.strip():
            raise PromptError("The memory heading is empty: pass a line that says what the facts are.")
        self._tokenizer = tokenizer
        self._fallback = None if getattr(tokenizer, "chat_template", None) else BASE_MODEL_TEMPLATE
        self._heading = heading.rstrip() + "\n"
        self._default_system = default_system
        self._control = ControlTokens(tokenizer)
        self._opening = _opening(tokenizer)
        self._system_first: dict[bool, bool] = {}
        # A template that writes today's date would give every fact another key each day.
        pinned = {"strftime_now": _ENCODE_DAY.strftime}
        self.encode_preamble = self._split([{"role": "user", "content": "?"}], None, pinned).preamble

    def split(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> Frame:
        """The conversation, open where its facts go.

        Args:
            messages: ends with a question of the user, or with the result of a tool.
            tools: as chat APIs take them. A chat template that knows nothing of tools gets them, their calls and
                results as words.

        Raises:
            PromptError: an empty conversation or question, a last message nobody answers, content that is not
                text, tools that are none, or messages the chat template refuses.
        """
        return self._split(messages, tools, {})

    def behind_system(self, messages: Sequence[Message]) -> Frame:
        """The conversation, open where the app's system text ends and the first word of anybody stands. Nothing
        is put there; what stands before it is the same in every conversation under that system text."""
        system, rest, _ = self._read(messages, None)
        text = self._default_system if system is None else system
        mark = _mark(repr((text, rest)))
        marked = [{**rest[0], "content": f"{mark}{rest[0]['content'] or ''}"}, *rest[1:]]
        placed = self._place(text, marked, gap="\n\n", tools=None) if text else marked
        return self._cut(placed, mark, system, None, {})

    def plain(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> tuple[int, ...]:
        """The same conversation without heading and facts: for a user of whom nothing is remembered."""
        system, rest, tools = self._read(messages, tools)
        text = self._default_system if system is None else system
        placed = self._place(text, rest, gap="\n\n", tools=tools) if text else rest
        return self._begun(self._ids(self._render(placed, tools, {})))

    def fact_ids(self, line: str) -> tuple[int, ...]:
        """Token ids of a fact's line, the same wherever it stands; never a control token among them.

        Raises:
            PromptError: `line` is not one line that ends in a newline, as `fact_line` writes it.
        """
        if not line.endswith("\n") or "\n" in line[:-1]:
            raise PromptError(f"Not one line that ends in a newline: write {line[:40]!r} with fact_line.")
        ids = self._ids(self._control.defuse(line))
        # A normalizer may still make a control token out of other characters.
        return tuple(token for token in ids if token not in self._control.ids)

    def _split(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> Frame:
        system, rest, tools = self._read(messages, tools)
        text = self._default_system if system is None else system
        mark = _mark(repr((text, self._heading, rest, tools)))
        memory = f"{text}\n\n{self._heading}{mark}" if text else f"{self._heading}{mark}"
        placed = self._place(memory, rest, gap="\n", tools=tools)
        return self._cut(placed, mark, text if tools else system, tools, variables)

    def _cut(
        self,
        placed: list[dict[str, Any]],
        mark: str,
        system: str | None,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
    ) -> Frame:
        """The rendered conversation, cut at `mark`."""
        halves = self._render(placed, tools, variables).split(mark)
        if len(halves) != 2:
            raise PromptError(
                f"The chat template writes the place of the facts {len(halves) - 1} times instead of once: "
                "give the tokenizer a chat_template that writes each message once."
            )
        return Frame(self._begun(self._ids(halves[0])), self._ids(halves[1]), system)

    def _read(
        self, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[str | None, list[dict[str, Any]], list[dict[str, Any]]]:
        """The app's system text, if any, the conversation behind it (plain strings, checked, defused), and the
        tools that the template is to write."""
        if not messages:
            raise PromptError("The conversation is empty: pass at least one message of role 'user'.")
        offered = read_tools(tools)
        read = [with_read_arguments(_flat(message)) for message in messages]
        opening = 0
        while opening < len(read) and read[opening]["role"] in _SYSTEM_ROLES:
            opening += 1
        system = "\n\n".join(message["content"] for message in read[:opening]) if opening else None
        rest = read[opening:]
        if read[-1]["role"] not in _ANSWERED_ROLES:
            raise PromptError(
                f"The last message is of role {read[-1]['role']!r}, which nobody answers: end the "
                "conversation with a message of role 'user' (or 'tool')."
            )
        if read[-1]["role"] == "user" and not read[-1]["content"].strip():
            raise PromptError("The question is empty: put some text into the last message.")
        for message in rest:
            if message["role"] not in (*_SYSTEM_ROLES, "assistant"):
                message["content"] = self._control.defuse(message["content"])
        if not self._writes_tools:
            rest = [spelled_out(message) for message in rest]
            if offered:
                said = self._default_system if system is None else system
                system = "\n\n".join([*([said] if said else []), introduction(offered)])
            offered = []
        return system, rest, offered

    def _place(
        self, text: str, rest: list[dict[str, Any]], *, gap: str, tools: Sequence[Any] | None
    ) -> list[dict[str, Any]]:
        """The conversation with `text` where this template takes a system text."""
        if self._writes_system_first(bool(tools)):
            return [{"role": "system", "content": text}, *rest]
        if rest[0]["role"] != "user":  # nothing of the conversation may come before the facts
            return [{"role": "user", "content": text}, *rest]
        return [{**rest[0], "content": f"{text}{gap}{rest[0]['content']}"}, *rest[1:]]

    def _writes_system_first(self, tools: bool) -> bool:
        """Whether a system message is written at all, and before every word of the conversation."""
        if tools not in self._system_first:
            system, *said = (secrets.token_hex(8) for _ in range(4))
            roles = ("system", "user", "assistant", "user")
            probe = [
                {"role": role, "content": text} for role, text in zip(roles, (system, *said), strict=True)
            ]
            try:
                rendered = self._render(probe, [_PROBE_TOOL] if tools else None, {})
            except PromptError:
                rendered = ""
            before, found, _ = rendered.partition(system)
            self._system_first[tools] = bool(found) and not any(text in before for text in said)
        return self._system_first[tools]

    @cached_property
    def _writes_tools(self) -> bool:
        """Whether the chat template knows of tools."""
        probe = [{"role": "user", "content": "?"}]
        try:
            return self._render(probe, [_PROBE_TOOL], {}) != self._render(probe, None, {})
        except PromptError:
            return False

    def _render(
        self, messages: list[dict[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                chat_template=self._fallback,
                tokenize=False,
                add_generation_prompt=True,
                **variables,
            )
        except Exception as error:  # templates raise what they like
            raise PromptError(
                f"The model's chat template refuses this conversation ({error}): use the roles and the "
                "order of roles that the model knows, or give its tokenizer another chat_template."
            ) from error
        return str(rendered)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _begun(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """`ids` behind what the tokenizer begins a text with, unless the template wrote that already."""
        return ids if ids[: len(self._opening)] == self._opening else self._opening + ids


def _opening(tokenizer: Any) -> tuple[int, ...]:
    """Ids the tokenizer itself puts before a text: BOS, or nothing."""
    bare = tuple(tokenizer("a", add_special_tokens=False)["input_ids"])
    begun = tuple(tokenizer("a")["input_ids"])
    for start in range(len(begun)):
        if begun[start : start + len(bare)] == bare:
            return begun[:start]
    return ()


def _mark(surroundings: str) -> str:
    """A word that does not occur in `surroundings`."""
    while (mark := f"facts{secrets.token_hex(8)}") in surroundings:
        pass
    return mark


def _flat(message: Message) -> dict[str, Any]:
    """A copy of the message with one string as content (or None, where the model only called tools)."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError('Not a message: pass each as {"role": "user", "content": "..."}.')
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(_part_text(part) for part in content)
    if content is None and message["role"] != "assistant":
        content = ""
    if content is not None and not isinstance(content, str):
        kind = type(content).__name__
        raise PromptError(f"The content of a message is of type {kind}: pass text, or a list of text parts.")
    return {**as_plain(message, "a message"), "content": None if content is None else repaired(content)}


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise PromptError('Only text can be sent: leave out what is not {"type": "text", "text": "..."}.')
    return text
