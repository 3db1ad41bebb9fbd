"""A LlamaIndex chat engine over documents plus memories, for two users.

    pip install inferscale-memory llama-index-inferscale      (the engine first: docs/install.md)
    python examples/llama_index_documents.py

The documents are everybody's, the memories are each user's own. What a user said in earlier conversations is prefilled
once, when it is said. In every answer after that it is injected, and only the documents and the question are read.
"""

from __future__ import annotations

import tempfile
from typing import Any

from inferscale_memory import Memory

# isort: split
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.llms.inferscale import InferScaleLLM
from llama_index.memory.inferscale import InferScaleChatEngine

MENU = [
    "Dessert: walnut tart, with walnuts from the Dordogne. 7 euros.",
    "Dessert: lemon sorbet, without nuts and without milk. 5 euros.",
    "Starter: tomato soup with basil. 6 euros.",
    "The kitchen closes at ten in the evening, on Sundays at nine.",
]
EARLIER = {
    "maya": ["I am allergic to walnuts.", "I moved to Porto in March.", "I always have dessert."],
    "liam": ["I love walnuts more than anything.", "I have no money left this month.", "My dog is called Pablo."],
}
QUESTION = "Which dessert should I order?"


class SameEmbedder(BaseEmbedding):
    """The memory's embedder, for the documents too."""

    embedder: Any

    def _get_text_embedding(self, text: str) -> list[float]:
        return list(self.embedder.embed(text))

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def main(engine: Any = None) -> dict[str, Any]:
    """Ask for both users, and show what each answer stood on. Returns the responses."""
    engine = engine or {"provider": "transformers"}  # {"provider": "vllm"} where it is installed
    with tempfile.TemporaryDirectory() as folder, Memory.from_config({"engine": engine, "folder": folder}) as memory:
        for user, facts in EARLIER.items():
            memory.add([{"role": "user", "content": fact} for fact in facts], user_id=user, infer=False)
        memory.flush()  # every fact is prefilled, once

        documents = [Document(text=line) for line in MENU]
        index = VectorStoreIndex.from_documents(documents, embed_model=SameEmbedder(embedder=memory.embedding_model))
        llm = InferScaleLLM(memory=memory, max_tokens=40)
        responses = {}
        for user in EARLIER:
            chat = InferScaleChatEngine.from_defaults(
                memory, llm, user_id=user, infer=False, retriever=index.as_retriever(similarity_top_k=2)
            )
            responses[user] = response = chat.chat(QUESTION)
            show(user, response)
        return responses


def show(user: str, response: Any) -> None:
    print(f"\n{user}: {QUESTION}\n{response}\n")
    for source in response.source_nodes:
        kind = ("injected" if source.metadata["injected"] else "as text") if "injected" in source.metadata else "read"
        print(f"  {kind:8}  {source.score:5.2f}  {source.text}")
    usage = response.metadata["usage"]
    print(
        f"  {usage['injected_tokens']} tokens injected, {usage['cached_tokens']} cached, "
        f"{usage['prefilled_tokens']} prefilled; first token after {response.metadata['ttft_s'] * 1000:.0f} ms"
    )


if __name__ == "__main__":
    main()
