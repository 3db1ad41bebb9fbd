"""What a prompt is made of: runs of token ids, some of which have a blob.

A prompt always holds the real token ids of everything in it, whether a blob is injected for them or not. That
is what makes a missing blob cost time and never an answer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

PUBLIC_OWNER = "public"
"""Owner of segments that hold no user text (the preamble). Every owner may inject them."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of prompt token ids, with or without a blob.

    Attributes:
        ids: token ids, at least one.
        key: blob key to inject for them; None means they are prefilled like any text.
        tag: name of the fact these ids say, if any: forgetting it evicts every cached block that holds them.
    """

    ids: tuple[int, ...]
    key: str | None = None
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """An ordered list of segments, belonging to one owner.

    Attributes:
        owner: whose memories these are; nothing injected crosses it.
        segments: preamble, facts, suffix. The leading ones that carry a key are injected.
        salt: separates otherwise equal prompts in the engine's prefix cache (measurements, comparisons).
    """

    owner: str
    segments: tuple[Segment, ...]
    salt: str = field(default="")

    @property
    def ids(self) -> list[int]:
        """All token ids, in order."""
        return [token for segment in self.segments for token in segment.ids]

    @property
    def composition(self) -> tuple[Segment, ...]:
        """The leading segments that carry a key: what is asked to be injected."""
        for index, segment in enumerate(self.segments):
            if segment.key is None:
                return self.segments[:index]
        return self.segments

    def without(self, tags: Collection[str]) -> Prompt:
        """The prompt without the segments that carry one of `tags`."""
        return replace(self, segments=tuple(part for part in self.segments if part.tag not in tags))

    def as_text(self) -> Prompt:
        """The same ids with nothing injected."""
        return replace(self, segments=tuple(replace(segment, key=None) for segment in self.segments))

    def salted(self, salt: str) -> Prompt:
        """The same prompt, apart from every other in the engine's prefix cache."""
        return replace(self, salt=salt)
