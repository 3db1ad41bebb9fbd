"""The ids by which a conversation goes on from the prompt of the turn before: the user's next message, with what is
newly recalled in it as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from inferscale_memory.prompt import PromptTemplate, Segment
from inferscale_memory.recall.retrieved import RetrievedMemory

_ALSO = "You also remember:\n"
_STAND_INS = ("yes", "no")


def fitting(unseen: Sequence[RetrievedMemory], budget: int | None, standing: int) -> list[RetrievedMemory]:
    """The first of `unseen` that fit a budget of tokens, of which `standing` are taken."""
    sizes = accumulate((len(item.ids) for item in unseen), initial=standing)
    next(sizes)
    return [item for item, size in zip(unseen, sizes, strict=True) if budget is None or size <= budget]


def with_memories(text: str, new: Sequence[RetrievedMemory]) -> str:
    """The user's message with what is newly recalled above it."""
    lines = "".join(item.line for item in reversed(new))  # the most relevant nearest to the question
    return f"{_ALSO}{lines}\n{text}" if new else text


def turn_ids(template: PromptTemplate, text: str) -> tuple[int, ...] | None:
    """Ids from the end of an answer to the opening of the next one, with the user's `text` in between.

    They are what two conversations that differ in the answer alone have in common behind it. None where the
    template leaves answers out.
    """
    one, other = (
        template.split(
            [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": text},
            ]
        ).suffix
        for answer in _STAND_INS
    )
    if one == other:
        return None
    common = 0
    while one[-1 - common] == other[-1 - common]:
        common += 1
    return one[len(one) - common :]


def tagged(ids: tuple[int, ...], new: Sequence[RetrievedMemory]) -> list[Segment]:
    """`ids` in segments that carry the tags of the memories in them. A tag stands for all that follows it, so
    the tags may stand at the very beginning."""
    tags = [item.tag for item in new][: len(ids) - 1]
    head = [Segment((token,), None, tag) for token, tag in zip(ids, tags, strict=False)]
    return [*head, Segment(ids[len(tags) :])]
