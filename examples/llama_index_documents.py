"""A LlamaIndex chat engine over documents plus memories, for two users.

    pip install ./integrations/llama-index    # after the engine and the core: docs/install.md
    python examples/llama_index_documents.py

The documents are everybody's, the memories are each user's own. What a user said earlier was prefilled once, when it
was said: it is injected into every answer, and only the documents and the question are read.
"""

import sys
from typing import Any

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.llms.inferscale import InferScaleLLM
from llama_index.memory.inferscale import InferScaleChatEngine

from inferscale_memory import Memory

HOUSE_RULES = [
    "The kitchen closes at ten in the evening.",
    "Guests may bring one dog.",
    "Breakfast starts at seven.",
]
SAID_EARLIER = {
    "maya": ["I am allergic to walnuts.", "I moved to Porto in March.", "My cat is called Miso."],
    "omar": ["I am allergic to fish.", "I live in Berlin.", "My dog is called Pablo."],
}


class SameEmbedder(BaseEmbedding):
    """The memory's embedder, for the documents."""

    embedder: Any

    def _get_text_embedding(self, text: str) -> list[float]:
        return list(self.embedder.embed(text))

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


with Memory(
    {"engine": {"provider": "transformers"}},
    folder=sys.argv[1] if len(sys.argv) > 1 else "/tmp/llama-index-documents",
) as memory:
    for user, facts in SAID_EARLIER.items():
        memory.delete_all(user_id=user)  # of an earlier run of this example
        memory.add([{"role": "user", "content": fact} for fact in facts], user_id=user, infer=False)
    memory.flush()

    documents = [Document(text=rule) for rule in HOUSE_RULES]
    index = VectorStoreIndex.from_documents(
        documents, embed_model=SameEmbedder(embedder=memory.embedding_model)
    )
    llm = InferScaleLLM(memory=memory, max_tokens=24)
    retriever = index.as_retriever(similarity_top_k=1)
    related = [SimilarityPostprocessor(similarity_cutoff=0.3)]

    for user in SAID_EARLIER:
        chat = InferScaleChatEngine.from_defaults(
            memory, llm, user_id=user, infer=False, retriever=retriever, node_postprocessors=related
        )
        for question in ("What am I allergic to?", "When does the kitchen close?"):
            response = chat.chat(question)
            print(f"\n{user}: {question}\n  {response}")
            for source in response.source_nodes:
                how = "injected" if source.metadata.get("injected") else "read"
                print(f"  {how:8}  {source.score:5.2f}  {source.text}")
            usage = response.metadata["usage"]
            print(f"  {usage['injected_tokens']} tokens injected, {usage['prefilled_tokens']} prefilled")
