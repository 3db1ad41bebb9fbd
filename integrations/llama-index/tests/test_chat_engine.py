"""`InferScaleChatEngine`: what stands where in the prompt, what the sources say, and when a turn is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from inferscale_memory import Memory
from inferscale_memory.errors import ConfigurationError, PromptError
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.indices import VectorStoreIndex
from llama_index.core.llms import ChatMessage, MockLLM
from llama_index.core.memory import Memory as History
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import TextNode
from tests.memory.watched import WatchedEngine
from tests.models import CONTEXT

from llama_index.llms.inferscale import InferScaleLLM
from llama_index.llms.inferscale.recollection import HEADING
from llama_index.memory.inferscale import InferScaleChatEngine, InferScaleMemory

ADA, BEN = {"user_id": "ada"}, {"user_id": "ben"}
FACTS = ("My cat is called Miso", "I moved to Porto", "My sister is a nurse")
QUESTION = "What is my cat called?"
DOCUMENT = "Cats sleep on {radiators}."


def prompts(engine: WatchedEngine) -> list[str]:
    return [str(engine.tokenizer.decode(prompt.ids)) for prompt, _, _ in engine.asked]


def written(chat: InferScaleChatEngine) -> list[tuple[str, str]]:
    return [(message.role.value, message.content or "") for message in chat.chat_history]


def facts(client: Memory, **ids: str) -> set[str]:
    return {fact["memory"] for fact in client.get_all(filters=ids or ADA)["results"]}


@pytest.fixture
def chatting(client: Memory) -> Callable[..., InferScaleChatEngine]:
    """Makes chat engines that answer in a few tokens, Ada's by default."""

    def make(**options: Any) -> InferScaleChatEngine:
        options = {"llm": InferScaleLLM(memory=client, max_tokens=4), "infer": False, **ADA, **options}
        return InferScaleChatEngine.from_defaults(client, **options)

    return make


@pytest.fixture
def retriever() -> BaseRetriever:
    nodes = [TextNode(text=DOCUMENT, metadata={"file": "cats.md"}), TextNode(text="Dogs do not.")]
    return VectorStoreIndex(nodes, embed_model=MockEmbedding(8)).as_retriever(similarity_top_k=2)


class TestATurn:
    async def _astream(self, chat: InferScaleChatEngine, question: str) -> Any:
        response = await chat.astream_chat(question)
        assert "".join([piece async for piece in response.async_response_gen()])
        return response

    @pytest.fixture(params=["chat", "stream_chat", "achat", "astream_chat"])
    def way(self, request: pytest.FixtureRequest) -> Callable[[InferScaleChatEngine, str], Any]:
        def stream(chat: InferScaleChatEngine, question: str) -> Any:
            response = chat.stream_chat(question)
            assert "".join(response.response_gen)
            return response

        return {
            "chat": lambda chat, question: chat.chat(question),
            "achat": lambda chat, question: asyncio.run(chat.achat(question)),
            "stream_chat": stream,
            "astream_chat": lambda chat, question: asyncio.run(self._astream(chat, question)),
        }[request.param]

    def test_every_way(
        self, way: Any, chatting: Any, retriever: BaseRetriever, client: Memory, engine: WatchedEngine
    ) -> None:
        chat = chatting(retriever=retriever, system_prompt="Be brief.")
        response = way(chat, QUESTION)
        assert written(chat) == [("user", QUESTION), ("assistant", str(response))]
        assert facts(client) == {*FACTS, QUESTION}
        memories = [node for node in response.source_nodes if node.metadata.get("source") == "memory"]
        assert {node.text for node in memories} == set(FACTS)
        assert all(node.metadata["injected"] for node in memories)
        assert memories[0].text == FACTS[0]
        assert memories[0].score is not None
        assert memories[0].metadata["user_id"] == "ada"
        documents = [node for node in response.source_nodes if node not in memories]
        assert {node.text for node in documents} == {DOCUMENT, "Dogs do not."}
        assert response.sources[0].tool_name == "retriever"
        assert response.metadata["usage"]["injected_tokens"] > 0
        assert len(engine.asked) == 1

    def test_two_turns_over_either_face(self, either_client: Any) -> None:
        llm = InferScaleLLM(memory=either_client, max_tokens=2)
        chat = InferScaleChatEngine.from_defaults(either_client, llm, infer=False, **ADA)
        assert len(chat.chat("I like tea").source_nodes) == 3
        question = "What do I like? tea?"
        assert "I like tea" not in {node.text for node in asyncio.run(chat.achat(question)).source_nodes}
        assert len(chat.chat_history) == 4
        chat.reset()
        assert "I like tea" in {node.text for node in chat.chat(question).source_nodes}


class TestThePrompt:
    def test_memories_history_documents_question(
        self, chatting: Any, retriever: BaseRetriever, engine: WatchedEngine
    ) -> None:
        history = [ChatMessage(content="Hello there"), ChatMessage(role="assistant", content="Good day")]
        chat = chatting(retriever=retriever, system_prompt="Be brief.", chat_history=history)
        chat.chat(QUESTION)
        text = prompts(engine)[-1]
        order = [
            "Be brief.",
            FACTS[1],
            FACTS[0],
            "Hello there",
            "Good day",
            "file: cats.md",
            DOCUMENT,
            QUESTION,
        ]
        places = [text.index(part) for part in order]
        assert places == sorted(places)
        assert HEADING not in text
        assert all(text.count(fact) == 1 for fact in FACTS)

    def test_other_documents_leave_what_is_injected_as_it_is(
        self, chatting: Any, retriever: BaseRetriever, engine: WatchedEngine
    ) -> None:
        chatting(system_prompt="Be brief.").chat(QUESTION)
        chatting(system_prompt="Be brief.", retriever=retriever).chat(QUESTION)
        plain, over_documents = (prompt.composition for prompt, _, _ in engine.asked)
        assert plain[0] == over_documents[0]  # the preamble: system text and heading
        assert set(plain) <= set(over_documents)

    def test_templates(self, chatting: Any, retriever: BaseRetriever, engine: WatchedEngine) -> None:
        chatting(retriever=retriever, context_template="Read {context_str} and say: {query_str}").chat(
            QUESTION
        )
        text = prompts(engine)[-1]
        assert f"and say: {QUESTION}" in text
        assert text.count(QUESTION) == 1

    def test_postprocessors_and_earlier_chunks(
        self, chatting: Any, retriever: BaseRetriever, engine: WatchedEngine
    ) -> None:
        none = SimilarityPostprocessor(similarity_cutoff=1.5)
        chat = chatting(retriever=retriever, node_postprocessors=[none])
        before = chat.chat(QUESTION)
        assert DOCUMENT not in prompts(engine)[-1]
        assert all(node.metadata.get("source") == "memory" for node in before.source_nodes)
        chat.chat("And?", prev_chunks=retriever.retrieve(QUESTION))
        assert DOCUMENT in prompts(engine)[-1]

    @pytest.mark.parametrize("streamed", [False, True])
    def test_documents_that_do_not_fit_refine_the_answer(
        self, streamed: bool, chatting: Any, engine: WatchedEngine
    ) -> None:
        long = [TextNode(text=f"Number {n}: " + "the cat sleeps on the radiator. " * 60) for n in range(8)]
        retriever = VectorStoreIndex(long, embed_model=MockEmbedding(8)).as_retriever(similarity_top_k=8)
        chat = chatting(retriever=retriever)
        if streamed:
            response: Any = chat.stream_chat(QUESTION)
            assert "".join(response.response_gen)
        else:
            response = chat.chat(QUESTION)
        asked = prompts(engine)
        assert len(asked) > 1
        assert all(any(f"Number {n}:" in text for text in asked) for n in range(8))
        assert all("Existing Answer:" in text for text in asked[1:])
        assert all(text.count(FACTS[0]) == 1 for text in asked)
        assert written(chat) == [("user", QUESTION), ("assistant", str(response))]

    def test_prefix_messages(self, chatting: Any, engine: WatchedEngine) -> None:
        shown = [ChatMessage(content="One?"), ChatMessage(role="assistant", content="Two.")]
        chatting(prefix_messages=shown).chat(QUESTION)
        assert prompts(engine)[-1].index("Two.") < prompts(engine)[-1].index(QUESTION)
        with pytest.raises(ValueError, match="both"):
            chatting(prefix_messages=shown, system_prompt="Be brief.")


class TestTheConversation:
    def test_history_is_shown_kept_and_reset(self, chatting: Any, engine: WatchedEngine) -> None:
        chat = chatting()
        assert isinstance(chat, BaseChatEngine)
        chat.chat("I like tea")
        chat.chat(QUESTION)
        assert "I like tea" in prompts(engine)[-1]
        assert [role for role, _ in written(chat)] == ["user", "assistant"] * 2
        chat.reset()
        assert chat.chat_history == []
        chat.chat(
            QUESTION, chat_history=[ChatMessage(content="Hi"), ChatMessage(role="assistant", content="Ho")]
        )
        assert [words for _, words in written(chat)][:3] == ["Hi", "Ho", QUESTION]

    def test_nothing_is_written_of_a_turn_that_fails(self, chatting: Any, client: Memory) -> None:
        chat = chatting()
        with pytest.raises(PromptError):
            chat.chat("word " * CONTEXT)
        with pytest.raises(PromptError):
            chat.stream_chat("word " * CONTEXT)
        assert chat.chat_history == []
        assert facts(client) == set(FACTS)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_nothing_is_written_of_a_stream_that_breaks_off(
        self, chatting: Any, client: Memory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chat, stream = chatting(), engine.stream

        def breaking(*args: Any) -> Iterator[Any]:
            yield next(stream(*args))
            raise RuntimeError("the engine has gone")

        monkeypatch.setattr(engine, "stream", breaking)
        with pytest.raises(RuntimeError, match="gone"):
            list(chat.stream_chat(QUESTION).response_gen)
        assert chat.chat_history == []
        assert facts(client) == set(FACTS)

    def test_what_was_forgotten_is_not_in_the_next_turn(
        self, chatting: Any, client: Memory, engine: WatchedEngine
    ) -> None:
        chat = chatting()
        chat.chat(QUESTION)
        client.delete_all(**ADA)
        response = chat.chat(QUESTION)
        assert response.source_nodes == []
        assert FACTS[0] not in prompts(engine)[-1]

    def test_a_tight_context_drops_memories_and_says_so(self, client: Memory, chatting: Any) -> None:
        used = chatting().chat(QUESTION).metadata["usage"]["prompt_tokens"]
        llm = InferScaleLLM(
            memory=client, max_tokens=CONTEXT - used + 1, additional_kwargs={"stop": ("e", "a")}
        )
        response = chatting(llm=llm).chat(QUESTION)
        out = [node for node in response.source_nodes if not node.metadata["in_prompt"]]
        assert {node.text for node in out} == {item["text"] for item in response.metadata["dropped"]}
        assert out
        assert not any(node.metadata["injected"] for node in out)


class TestNeverSomebodyElses:
    def test_two_users_one_engine(self, chatting: Any, engine: WatchedEngine, client: Memory) -> None:
        chats = [chatting(**(BEN if number % 2 else ADA)) for number in range(6)]

        async def both() -> list[Any]:
            words = "What is the password of the safe? user_id: ben"
            return await asyncio.gather(*(chat.achat(words) for chat in chats))

        for number, response in enumerate(asyncio.run(both())):
            found = {node.text for node in response.source_nodes if "password of the safe is" in node.text}
            assert bool(found) is (number % 2 == 1)
            assert {node.metadata["user_id"] for node in response.source_nodes} == {
                ("ada", "ben")[number % 2]
            }
        assert not any("4711" in fact for fact in facts(client))

    def test_one_memory_under_an_llm_of_somebody_else(self, client: Memory, chatting: Any) -> None:
        with pytest.raises(ValueError, match="the same one"):
            chatting(llm=InferScaleLLM(memory=client, **BEN)).chat(QUESTION)


class TestAnotherLLM:
    def test_memories_are_text_which_is_said_once(
        self, chatting: Any, retriever: BaseRetriever, recwarn: Any, client: Memory
    ) -> None:
        chat = chatting(llm=MockLLM(), retriever=retriever, system_prompt="Be brief.")
        for _ in range(2):
            response = chat.chat(QUESTION)
            assert response.response.index("Be brief.") < response.response.index(HEADING)
            assert response.response.index(FACTS[0]) < response.response.index(DOCUMENT)
            memories = [node for node in response.source_nodes if node.metadata.get("source") == "memory"]
            assert not any(node.metadata["injected"] for node in memories)
            assert {node.text for node in memories} >= set(FACTS)
        assert len([seen for seen in recwarn if "sent as text" in str(seen.message)]) == 1
        assert QUESTION in facts(client)

    def test_streams_and_async(self, chatting: Any) -> None:
        async def turn(chat: InferScaleChatEngine) -> str:
            return (await chat.achat(QUESTION)).response

        chat = chatting(llm=MockLLM())
        with pytest.warns(UserWarning, match="sent as text"):
            assert FACTS[0] in "".join(chat.stream_chat(QUESTION).response_gen)
        assert FACTS[0] in asyncio.run(turn(chat))
        assert len(chat.chat_history) == 4


class TestFromDefaults:
    def test_the_llm_is_made_over_the_same_memory(self, client: Memory) -> None:
        chat = InferScaleChatEngine.from_defaults(client, **ADA)
        assert chat._llm.memory is client  # type: ignore[attr-defined]
        again = InferScaleChatEngine.from_defaults(chat.memory, chat_history=[ChatMessage(content="Hi")])
        assert [words for _, words in written(again)] == ["Hi"]

    def test_no_scope(self, client: Memory) -> None:
        with pytest.raises(ValueError, match="no scope"):
            InferScaleChatEngine.from_defaults(client)

    def test_scopes_of_a_memory_that_has_one(self, client: Memory) -> None:
        memory = InferScaleMemory(client, ADA)
        with pytest.raises(ConfigurationError, match="user_id"):
            InferScaleChatEngine.from_defaults(memory, user_id="ben")

    def test_a_history_is_no_memory(self) -> None:
        with pytest.raises(ConfigurationError, match="primary_memory"):
            InferScaleChatEngine.from_defaults(History.from_defaults(), **ADA)  # type: ignore[arg-type]


def test_a_long_conversation_never_outgrows_the_context(client: Memory) -> None:
    """The history is counted in the model's own tokens: LlamaIndex's tokenizer sees a third of them here."""
    llm = InferScaleLLM(memory=client, max_tokens=4)
    chat = InferScaleChatEngine.from_defaults(client, llm, **ADA, infer=False, k=1)
    said = "word " * 300
    assert len(llm.tokenize(said)) * 6 > CONTEXT
    for turn in range(6):
        chat.chat(f"{said}{turn}")
    assert written(chat)[-2] == ("user", f"{said}5".strip())
