"""An embedder for tests: words hashed into a few dimensions. Texts that share words are alike."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any

from mem0.embeddings.base import EmbeddingBase

DIMENSIONS = 64


class HashingEmbedder(EmbeddingBase):  # type: ignore[misc]  # mem0 has no types
    """mem0's embedder interface; deterministic, normalised, 64 dimensions."""

    def embed(self, text: str, memory_action: Any = None) -> list[float]:
        vector = [0.0] * DIMENSIONS
        for word in re.findall(r"\w+", text.lower()):
            digest = blake2b(word.encode(), digest_size=4).digest()
            vector[int.from_bytes(digest[:2]) % DIMENSIONS] += 1.0 if digest[2] % 2 else -1.0
        norm = sum(value * value for value in vector) ** 0.5 or 1.0
        return [value / norm for value in vector]

    def embed_batch(self, texts: list[str], memory_action: Any = "add") -> list[list[float]]:
        return [self.embed(text) for text in texts]
