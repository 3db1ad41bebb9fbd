"""What mem0 asks of a model when facts are to be drawn out of messages, and which answers it can use.

mem0 takes an answer that it cannot read for one with nothing in it, so what was said would be lost without a word.
Here every answer is judged by mem0's own way of reading before mem0 sees it. What is said about a bad one must
never quote it: it holds what a user said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mem0.configs.prompts import ADDITIVE_EXTRACTION_PROMPT, AGENT_CONTEXT_SUFFIX
from mem0.exceptions import LLMError
from mem0.memory.utils import extract_json, remove_code_blocks

from inferscale_memory.errors import ExtractionError
from inferscale_memory.extraction.grounding import copied
from inferscale_memory.scripts import word_count

LEAST_ANSWER = 256
"""Tokens of answer below which extraction is not begun: there would be room for a fact or two."""

_CHARACTERS = 600
_TOKENS_PER_FACT = _CHARACTERS // 3 + 24
_MOST_FACTS = 24
_PLAIN = r'[^"\\\x00-\x1f]'
# Up to _CHARACTERS in all. Grammars count plain characters fast, and escapes slowly: so few of them, each with a bound
# of its own for what stands behind it.
_QUOTES, _BEHIND_QUOTE = 4, 59
_TEXT = (
    rf'^[^ "\\\x00-\x1f]{_PLAIN}{{0,{_CHARACTERS - 1 - _QUOTES * (_BEHIND_QUOTE + 1)}}}'
    rf'(?:["\\]{_PLAIN}{{0,{_BEHIND_QUOTE}}}){{0,{_QUOTES}}}$'
)
_WORDS_PER_FACT = 8

SHORT_INSTRUCTIONS = """You extract memories from conversations. Write down every fact in the New Messages that is \
worth remembering about the people in them: who they are, what they like, own, plan, did and decided, and what was \
recommended to them.

- Each memory is one complete sentence that can be understood alone: write names, or "User", instead of pronouns.
- Keep every name, number, date and place exactly as it was said.
- Turn words such as "yesterday" into dates; today is the Observation Date.
- Take nothing from Existing Memories or Last k Messages: they are there to be understood, not to be repeated.
- "attributed_to" is "user" for what the user said and "assistant" for what the assistant said.
- Greetings and small talk are no memories. If there is nothing to remember, answer {"memory": []}.

Answer in JSON only. For the New Messages "I'm Lena. Tomorrow I fly to Oslo with my dog Pip." on the Observation Date \
2025-03-04 the answer is:

{"memory": [{"id": "0", "text": "User's name is Lena", "attributed_to": "user"}, {"id": "1", "text": "Lena flies to \
Oslo on 2025-03-05 with her dog Pip", "attributed_to": "user"}]}
"""
"""For models in whose context mem0's instructions, of 8,000 tokens, leave no room for a conversation."""

EXAMPLE_NAMES = ("Lena", "Oslo", "Pip", "2025-03-04", "2025-03-05")
"""Names and numbers of the example in `SHORT_INSTRUCTIONS`."""

NOTHING = '{"memory": []}'
"""The answer of a model that finds nothing to remember."""

_BESIDE = re.compile(r"## Last k Messages\n.*?\n\n## New Messages\n", re.DOTALL)
_ROLE = re.compile(r"^(?:user|assistant|system):", re.MULTILINE)


class ExtractionLLMError(ExtractionError, LLMError):  # type: ignore[misc]  # mem0 has no types
    """An extraction that failed, as mem0's error of a failed model call too, which apps catch."""

    def __init__(self, message: str) -> None:
        LLMError.__init__(
            self, message, error_code="LLM_001", suggestion="Call retry_failed() on the memory, or add again."
        )


class TooMuchError(ExtractionLLMError):
    """The messages, or the facts in them, are more than the model takes at once. Fewer of them may fit."""


class CopiedError(ExtractionLLMError):
    """The model has copied its instructions, and drawn nothing out of the messages."""


def is_extraction(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these are mem0's messages of an extraction."""
    first = messages[0] if messages else {}
    return first.get("role") == "system" and str(first.get("content")).startswith(ADDITIVE_EXTRACTION_PROMPT)


def shortened(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """mem0's messages of an extraction with the short instructions."""
    system = str(messages[0]["content"])
    suffix = AGENT_CONTEXT_SUFFIX if system.endswith(AGENT_CONTEXT_SUFFIX) else ""
    return [{**messages[0], "content": SHORT_INSTRUCTIONS + suffix}, *messages[1:]]


def says_nothing(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these are mem0's messages of an extraction from messages without a word."""
    return is_extraction(messages) and not _ROLE.sub("", _new_messages(messages)).strip()


def alone(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """mem0's messages of an extraction without what it puts beside the new messages: the last ones, and what is known
    already. Both only help to understand the new ones."""
    head, *rest = messages
    *between, last = rest
    text = _BESIDE.sub(
        "## Last k Messages\n\n\n## Recently Extracted Memories\n[]\n\n## Existing Memories\n[]\n\n## New Messages\n",
        str(last.get("content")),
        count=1,
    )
    return [head, *between, {**last, "content": text}]


def without_copies(answer: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """An answer to `SHORT_INSTRUCTIONS` without the facts that were copied out of them; as it is where there are none,
    or where mem0 cannot read it.

    Raises:
        CopiedError: all of them were.
    """
    try:
        facts = _read(remove_code_blocks(answer))["memory"]
        said = str(messages[-1].get("content"))
        own = [fact for fact in facts if not _is_copy(fact.get("text") or "", said)]
    except (ValueError, LookupError, TypeError, AttributeError):  # `check_answer` says what is wrong with it
        return answer
    if facts and not own:
        raise CopiedError(
            f"the model has copied the example of its instructions: take a larger one. {_REMEDY}"
        )
    return answer if len(own) == len(facts) else json.dumps({"memory": own}, ensure_ascii=False)


def _is_copy(fact: str, said: str) -> bool:
    return copied(fact, said=said, instructions=SHORT_INSTRUCTIONS, names=EXAMPLE_NAMES)


def schema_for(messages: Sequence[Mapping[str, Any]], max_tokens: int) -> dict[str, Any]:
    """The JSON schema of an extraction's answer.

    It bounds what a small model would go on with for ever: how long a fact is, and how many there are, which
    depends on how much was said and on what `max_tokens` hold. mem0 reads no `linked_memory_ids`, so there are
    none.
    """
    words = word_count(_new_messages(messages))
    facts = min(_MOST_FACTS, max_tokens // _TOKENS_PER_FACT, 2 + words // _WORDS_PER_FACT)
    fact = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[0-9]{1,2}$"},
            "text": {"type": "string", "pattern": _TEXT},
            "attributed_to": {"enum": ["user", "assistant"]},
        },
        "required": ["id", "text", "attributed_to"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"memory": {"type": "array", "maxItems": max(1, facts), "items": fact}},
        "required": ["memory"],
        "additionalProperties": False,
    }


def check_answer(answer: Any) -> list[str]:
    """The texts of the facts in an answer. Raises ExtractionLLMError where mem0 would find nothing in it, or break on
    it, though there may be something."""
    text = remove_code_blocks(answer)
    if not text.strip():
        raise ExtractionLLMError(f"the model gave no answer, or refused to. {_REMEDY}")
    try:
        read = _read(text)
    except ValueError as error:
        reason = getattr(error, "msg", "it is none")
        raise ExtractionLLMError(
            f"the model's answer is no JSON, or was cut off ({reason}): use a model that follows instructions, or "
            f"raise the max_tokens of the llm. {_REMEDY}"
        ) from None
    facts = read.get("memory", [] if not read else None) if isinstance(read, dict) else None
    if not isinstance(facts, list) or not all(isinstance(fact, dict) for fact in facts):
        raise ExtractionLLMError(
            'the model\'s answer is JSON of another shape than {"memory": [{"text": ...}]}: use a model that '
            f"follows instructions, and no custom instructions about the form. {_REMEDY}"
        )
    texts = [fact.get("text") for fact in facts]
    if not all(text is None or isinstance(text, str) for text in texts) or (texts and not any(texts)):
        raise ExtractionLLMError(
            f"the model's answer holds facts without a text: use a model that follows instructions. {_REMEDY}"
        )
    return [text for text in texts if text]


_REMEDY = "The messages are kept: retry_failed() tries again"


def _read(text: str) -> Any:
    """As mem0 reads it."""
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError:
        return json.loads(extract_json(text), strict=False)


def _new_messages(messages: Sequence[Mapping[str, Any]]) -> str:
    return _section(str(messages[-1].get("content")), "## New Messages\n", "\n\n## Observation Date\n")


def _section(text: str, begin: str, end: str) -> str:
    """What stands between the two, or all of it where they do not occur."""
    _, begun, rest = text.partition(begin)
    within, ended, _ = rest.rpartition(end)
    return (within if ended else rest) if begun else text
