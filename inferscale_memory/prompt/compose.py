"""Puts facts into a frame: which of them fit, and in which order they stand.

Relevance is decided elsewhere. A fact must never be left out silently: what did not fit is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferscale_memory.errors import ContextOverflowError
from inferscale_memory.prompt.segments import Prompt, Segment
from inferscale_memory.prompt.template import Frame


@dataclass(frozen=True, slots=True)
class Fact:
    """A recalled fact.

    Attributes:
        ids: token ids of its line.
        key: blob key; None when it has no blob.
        tag: its name, by which it is forgotten.
        score: relevance; higher is more relevant.
        pinned: it stays, whatever was asked: it is left out last, and is never moved as one of the most relevant.
    """

    ids: tuple[int, ...]
    key: str | None = None
    tag: str | None = None
    score: float = 0.0
    pinned: bool = False


def check_fits(tokens: int, context: int) -> None:
    """Raises ContextOverflowError when a conversation of so many tokens leaves no room for an answer in a context of
    `context` tokens."""
    if tokens >= context:
        raise ContextOverflowError(
            f"The conversation has {tokens} tokens and leaves no room for an answer in a context of {context}: send "
            "fewer or shorter messages, or start the engine with a larger max_model_len."
        )


@dataclass(frozen=True, slots=True)
class Composed:
    """A prompt, and the facts that did not fit into it, in the order given."""

    prompt: Prompt
    dropped: tuple[Fact, ...]


def compose(
    frame: Frame,
    facts: Sequence[Fact],
    *,
    owner: str,
    max_tokens: int,
    context: int | None = None,
    most_of_facts: int | None = None,
    preamble_key: str | None = None,
    text_last: int = 0,
) -> Composed:
    """A prompt of preamble, injected facts, facts as text, and suffix.

    Facts stand in the order given, but facts as text follow the injected ones: first those without a blob,
    then the `text_last` most relevant. Left out are facts longer than all the room there is, then the least
    relevant until the rest fits, then pinned ones; of equally relevant facts the later one counts as more relevant.

    Args:
        frame: the split conversation.
        facts: in the order in which they shall stand.
        owner: whose prompt this is.
        max_tokens: most tokens of the prompt; those of the answer are not among them.
        context: most tokens of prompt and answer. With it a conversation that leaves less than the whole answer's room
            is no error: it is answered more shortly, and with facts up to half the context.
        most_of_facts: most tokens of the facts; None for as many as there is room for.
        preamble_key: blob key of the preamble. Without it nothing is injected: only leading segments are.
        text_last: how many of the most relevant facts stand as text, behind all others.

    Raises:
        ContextOverflowError: the conversation does not fit even without facts.
    """
    fixed = len(frame.preamble) + len(frame.suffix)
    check_fits(fixed, max_tokens + 1 if context is None else context)
    room = max_tokens - fixed
    if context is not None and room < 0:  # no answer can be as long as was allowed: share what there is
        room = max(0, context // 2 - fixed)
    if most_of_facts is not None:
        room = min(room, most_of_facts)
    possible = [index for index, fact in enumerate(facts) if len(fact.ids) <= room]
    # The least relevant first; stable.
    ranked = sorted(possible, key=lambda index: (facts[index].pinned, facts[index].score))
    size = sum(len(facts[index].ids) for index in ranked)
    left_out = 0
    while size > room:
        size -= len(facts[ranked[left_out]].ids)
        left_out += 1
    kept = ranked[left_out:]
    movable = [index for index in kept if not facts[index].pinned]
    last = sorted(movable[max(0, len(movable) - text_last) :])
    others = sorted(set(kept) - set(last))
    injected = [facts[index] for index in others if facts[index].key is not None]
    text = [facts[index] for index in others if facts[index].key is None]
    text += [facts[index] for index in last]
    prompt = Prompt(
        owner,
        (
            Segment(frame.preamble, preamble_key),
            *(Segment(fact.ids, fact.key, fact.tag) for fact in injected),
            *(Segment(fact.ids, None, fact.tag) for fact in text),
            Segment(frame.suffix),
        ),
    )
    return Composed(prompt, tuple(fact for index, fact in enumerate(facts) if index not in set(kept)))
