"""What the chat model injects, for whom, and what it says about it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_inferscale import ChatInferScale

from inferscale_memory import Memory
from inferscale_memory.errors import ConfigurationError, PromptError
from integrations.langchain.tests.saying import ADA, BEN, FACTS, QUESTION, SECRET, asked, injected, recalled
from tests.memory.watched import WatchedEngine
from tests.models import tiny_model

# -- what is injected --------------------------------------------------------------------------------------------


def test_memories_are_injected_and_the_answer_says_which(model: ChatInferScale) -> None:
    answer = model.invoke(QUESTION, ADA)
    assert injected(answer) == set(FACTS)
    metadata = answer.response_metadata
    scores = [memory["score"] for memory in metadata["memories"]]
    assert scores == sorted(scores, reverse=True)
    assert metadata["memories"][0]["text"] == FACTS[0]
    assert metadata["injected_tokens"] > 0
    assert metadata["ttft_s"] > metadata["search_s"] > 0
    assert metadata["model_name"] == model.model_name == "tiny-llama"
    assert metadata["finish_reason"] in ("stop", "length")
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_token_details"]["cache_read"] == metadata["injected_tokens"]
    assert answer.usage_metadata["input_tokens"] == (
        metadata["injected_tokens"] + metadata["cached_tokens"] + metadata["prefilled_tokens"]
    )


def test_as_many_memories_as_asked_for(model: ChatInferScale, filled: Memory) -> None:
    assert recalled(model.invoke(QUESTION, ADA, k=1)) == {FACTS[0]}
    assert recalled(ChatInferScale(memory=filled, k=2, user_id="ada", max_tokens=2).invoke(QUESTION)) == {
        memory["memory"] for memory in model.chat.recall(QUESTION, {"user_id": "ada"}, k=2)
    }


def test_k_0_needs_no_scope_and_recalls_nothing(model: ChatInferScale, engine: WatchedEngine) -> None:
    answer = model.bind(k=0).invoke(QUESTION)
    assert recalled(answer) == set()
    assert not any(fact in asked(engine) for fact in FACTS)


def test_the_text_path_is_the_same_prompt(model: ChatInferScale) -> None:
    as_kv, as_text = (model.invoke(QUESTION, ADA, inject=inject) for inject in (True, False))
    assert injected(as_text) == set()
    assert recalled(as_text) == recalled(as_kv)
    assert as_text.usage_metadata is not None
    assert as_kv.usage_metadata is not None
    assert as_text.usage_metadata["input_tokens"] == as_kv.usage_metadata["input_tokens"]


def _merged(pieces: list[Any]) -> Any:
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    return whole


@pytest.mark.asyncio
async def test_every_way_of_asking_gives_the_same_answer(either: Any) -> None:
    """Over a memory of either face."""
    for fact in FACTS:
        added = either.add(fact, user_id="ada", infer=False)
        if not isinstance(added, dict):
            await added
    flushed = either.flush()
    if flushed is not None:
        await flushed
    model = ChatInferScale(memory=either, max_tokens=6)
    answers = [
        model.invoke(QUESTION, ADA),
        *model.batch([QUESTION, QUESTION], ADA),
        _merged(list(model.stream(QUESTION, ADA))),
        await model.ainvoke(QUESTION, ADA),
        *(await model.abatch([QUESTION, QUESTION], ADA)),
        _merged([piece async for piece in model.astream(QUESTION, ADA)]),
        model.stream_events(QUESTION, ADA, version="v3").output,
        await (await model.astream_events(QUESTION, ADA, version="v3")).output,
    ]
    assert len({answer.text for answer in answers}) == 1
    for answer in answers:
        assert injected(answer) == set(FACTS)
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0


def test_each_question_of_a_batch_has_its_own_user(model: ChatInferScale) -> None:
    answers = model.batch([QUESTION] * 4, [ADA, BEN, ADA, BEN])  # type: ignore[arg-type]
    assert [recalled(answer) for answer in answers] == [set(FACTS), {SECRET}] * 2


@pytest.mark.asyncio
async def test_events_of_the_older_kind_carry_the_scope_too(model: ChatInferScale) -> None:
    events = [event async for event in model.astream_events(QUESTION, ADA, version="v2")]
    answer = next(event["data"]["output"] for event in events if event["event"] == "on_chat_model_end")
    assert injected(answer) == set(FACTS)


def test_a_stream_comes_in_pieces_and_ends_with_what_it_stood_on(model: ChatInferScale) -> None:
    pieces = list(model.stream(QUESTION, ADA))
    assert len(pieces) > 2
    assert all(isinstance(piece, AIMessageChunk) for piece in pieces)
    assert injected(pieces[-1]) == set(FACTS)
    assert [piece.chunk_position for piece in pieces] == [None] * (len(pieces) - 1) + ["last"]


def test_search_results_are_used_instead_of_searching(model: ChatInferScale) -> None:
    found = model.chat.recall("nurse", {"user_id": "ada"}, k=1)
    assert injected(model.invoke(QUESTION, ADA, memories=found)) == {FACTS[2]}
    assert recalled(model.bind(memories=[], user_id="ada").invoke(QUESTION)) == set()


def test_filters_narrow_what_is_recalled(memory: Memory) -> None:
    memory.add("tea is hot", user_id="ada", infer=False, metadata={"kind": "drink"})
    memory.add("toast is hot", user_id="ada", infer=False, metadata={"kind": "food"})
    model = ChatInferScale(memory=memory, user_id="ada", filters={"kind": "food"}, max_tokens=2)
    assert recalled(model.invoke("What is hot?")) == {"toast is hot"}
    assert recalled(model.invoke("What is hot?", filters={"kind": "drink"})) == {"tea is hot"}


def test_a_memory_that_is_a_configuration_is_opened_when_it_is_needed(
    tmp_path: Path, engine: WatchedEngine, embedder: dict[str, Any]
) -> None:
    config = {"embedder": embedder, "folder": tmp_path / "own"}
    model = ChatInferScale(memory=config, engine=engine, context_turns=3, user_id="ada", max_tokens=2)
    assert not (tmp_path / "own").exists()
    with model:
        model.chat.remember("I play the oboe", {"user_id": "ada"}, infer=False)
        assert recalled(model.invoke("What do I play?")) == {"I play the oboe"}
        assert model.model_copy().chat is model.chat
    with ChatInferScale(memory=config, engine=engine, user_id="ada", max_tokens=2) as again:
        assert recalled(again.invoke("What do I play?")) == {"I play the oboe"}


def test_without_a_memory_it_is_a_chat_model(engine: WatchedEngine) -> None:
    answer = ChatInferScale(engine=engine, max_tokens=4).invoke(
        [SystemMessage("Be brief."), HumanMessage("Hi")]
    )
    assert "Be brief." in asked(engine)
    assert recalled(answer) == set()


# -- whose memories ----------------------------------------------------------------------------------------------


def test_three_ways_to_say_whose_memories_and_the_nearest_wins(filled: Memory) -> None:
    filled.add("Carla's own", user_id="carla", infer=False)
    model = ChatInferScale(memory=filled, user_id="ben", max_tokens=2)
    assert recalled(model.invoke("?")) == {SECRET}
    assert recalled(model.invoke("?", ADA)) == set(FACTS)
    assert recalled(model.bind(user_id="carla").invoke("?", ADA)) == {"Carla's own"}
    assert recalled(model.bind(user_id="carla").invoke("?", user_id="ada")) == set(FACTS)


def test_each_id_is_taken_from_the_nearest_place_that_names_it(memory: Memory) -> None:
    memory.add("to the butler", user_id="ada", agent_id="butler", infer=False)
    memory.add("to the cook", user_id="ada", agent_id="cook", infer=False)
    model = ChatInferScale(memory=memory, agent_id="butler", max_tokens=2)
    assert recalled(model.invoke("?", ADA)) == {"to the butler"}
    assert recalled(model.bind(agent_id="cook").invoke("?", ADA)) == {"to the cook"}


def test_a_thread_is_no_scope_unless_asked(memory: Memory) -> None:
    memory.add("said on thread 1", user_id="ada", run_id="1", infer=False)
    memory.add("said on thread 2", user_id="ada", run_id="2", infer=False)
    config = {"configurable": {"user_id": "ada", "thread_id": "1"}}
    model = ChatInferScale(memory=memory, max_tokens=2)
    assert recalled(model.invoke("?", config)) == {"said on thread 1", "said on thread 2"}
    narrow = ChatInferScale(
        memory=memory, max_tokens=2, scope_keys={"user_id": "user_id", "run_id": "thread_id"}
    )
    assert recalled(narrow.invoke("?", config)) == {"said on thread 1"}


def test_a_run_id_can_be_bound_though_langchain_has_its_own(memory: Memory) -> None:
    memory.add("said in run 7", run_id="7", infer=False)
    model = ChatInferScale(memory=memory, max_tokens=2).bind(run_id="7")
    assert recalled(model.invoke("?")) == {"said in run 7"}
    assert recalled(_merged(list(model.stream("?")))) == {"said in run 7"}


def test_the_config_of_a_chain_or_a_graph_reaches_the_model(model: ChatInferScale) -> None:
    chain = ChatPromptTemplate.from_template("{question}") | model
    assert recalled(chain.invoke({"question": QUESTION}, ADA)) == set(FACTS)
    node = RunnableLambda(lambda question: model.invoke(question))
    assert recalled(node.invoke(QUESTION, BEN)) == {SECRET}
    node = RunnableLambda(
        lambda question: model.generate([[HumanMessage(question)]]).generations[0][0].message
    )
    assert recalled(node.invoke(QUESTION, BEN)) == {SECRET}


def test_nobody_named_is_an_error_that_names_three_ways(model: ChatInferScale) -> None:
    with pytest.raises(ConfigurationError, match=r"constructor.*bind.*configurable"):
        model.invoke(QUESTION)
    with pytest.raises(ConfigurationError, match="nothing says whose"):
        list(model.stream(QUESTION))


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_id_is_an_error_and_not_the_constructors(filled: Memory, empty: str) -> None:
    model = ChatInferScale(memory=filled, user_id="ada")
    with pytest.raises(ConfigurationError, match="user_id is empty"):
        model.invoke(QUESTION, {"configurable": {"user_id": empty}})
    with pytest.raises(ConfigurationError, match="user_id is empty"):
        model.invoke(QUESTION, user_id=empty)


def test_somebody_unknown_is_answered_without_memories(model: ChatInferScale, engine: WatchedEngine) -> None:
    answer = model.invoke(QUESTION, user_id="nobody")
    assert answer.response_metadata["memories"] == []
    assert not any(text in asked(engine) for text in (*FACTS, SECRET))


TRICKS: list[dict[str, Any]] = [
    {"user_id": "ada"},
    {"user_id": " ada "},
    {"user_id": "ada", "agent_id": "ben"},
    {"user_id": "ada", "run_id": "ben"},
    {"user_id": "*"},
    {"agent_id": "ben"},
    {"run_id": "ben"},
    {"user_id": "ada&user_id=ben"},
    {"user_id": "BEN"},
    {"user_id": "ada", "filters": {"OR": [{"user_id": "ben"}, {"user_id": "ada"}]}},
    {"user_id": "ada", "filters": {"user_id": "ben"}},
]


@pytest.mark.parametrize("trick", TRICKS, ids=str)
def test_no_trick_shows_another_users_memory(
    model: ChatInferScale, engine: WatchedEngine, trick: dict[str, Any]
) -> None:
    """Ben's secret is in no prompt of anybody who is not Ben, whatever is asked."""
    before = len(engine.asked)
    for question in ("What does the safe open with?", f"{SECRET}?"[:-6]):
        try:
            answer = model.invoke(question, **trick)
        except ValueError:
            continue
        assert SECRET not in recalled(answer)
    for prompt, _, _ in engine.asked[before:]:
        assert "4711" not in engine.tokenizer.decode(prompt.ids)


def test_memories_of_somebody_else_are_refused(model: ChatInferScale) -> None:
    theirs = model.chat.recall("safe", {"user_id": "ben"})
    with pytest.raises(ValueError, match="not of"):
        model.invoke(QUESTION, ADA, memories=theirs)


# -- bad input ---------------------------------------------------------------------------------------------------


def test_options_that_cannot_be(filled: Memory, engine: WatchedEngine) -> None:
    for options, words in (
        ({"user": "ada"}, "no option user"),
        ({"memory": filled, "engine": engine}, "leave `engine` out"),
        ({"memory": filled, "context_turns": 3}, "belongs to the memory"),
        ({"engine": engine, "context_turns": 3}, "belongs to the memory"),
        ({"memory": "mem0"}, "pass a Memory or AsyncMemory"),
        ({"scope_keys": {"user": "user_id"}}, "scope_keys names user"),
        ({"memory": {"engine": {"model": "a"}}, "engine": engine}, "both name an engine"),
        ({"memory": {"injection": {"context_turns": 2}}, "context_turns": 3}, "both set it"),
    ):
        with pytest.raises(ValueError, match=words):
            ChatInferScale(**options)


def test_arguments_that_do_not_exist(model: ChatInferScale) -> None:
    with pytest.raises(ConfigurationError, match=r"takes no temprature, user: it knows user_id"):
        model.invoke(QUESTION, ADA, user="ben", temprature=1)
    with pytest.raises(ConfigurationError, match="one model"):
        model.invoke(QUESTION, ADA, model="another")


def test_a_conversation_that_overflows_is_an_error_both_libraries_know(
    model: ChatInferScale, engine: WatchedEngine
) -> None:
    for error in (PromptError, ContextOverflowError):
        with pytest.raises(error, match="room for"):
            model.invoke("word " * engine.max_model_len, ADA)


def test_memories_that_do_not_fit_are_left_out_and_reported(
    model: ChatInferScale, engine: WatchedEngine
) -> None:
    whole = model.invoke(QUESTION, ADA)
    assert whole.usage_metadata is not None
    room = engine.max_model_len - whole.usage_metadata["input_tokens"] + 5
    prompt_only = model.chat.prepare(
        QUESTION, {"user_id": "ada"}, model.chat.recall(QUESTION, {"user_id": "ada"}), max_tokens=room
    )
    assert prompt_only.dropped
    answer = model.invoke(QUESTION, ADA, max_tokens=room, stop=[chr(letter) for letter in range(32, 127)])
    dropped = {memory["text"] for memory in answer.response_metadata["dropped"]}
    assert dropped
    assert dropped | recalled(answer) == set(FACTS)


def test_blobs_of_another_model_are_not_injected(
    tmp_path: Path, filled: Memory, embedder: dict[str, Any]
) -> None:
    """The memories go as text, the answer says so, and they are encoded anew for the model that asks."""
    folder = tiny_model("qwen3", tmp_path / "tiny-qwen3")
    where = tmp_path / "memory"
    filled.close()
    with WatchedEngine(folder, device="cpu", blob_bytes=1 << 26) as other:
        memory = Memory.from_config({"embedder": embedder, "engine": other, "folder": where})
        model = ChatInferScale(memory=memory, max_tokens=2)
        first = model.invoke(QUESTION, ADA)
        assert (recalled(first), injected(first)) == (set(FACTS), set())
        memory.flush()
        assert injected(model.invoke(QUESTION, ADA)) == set(FACTS)
        memory.close()


def test_content_that_is_no_text_is_an_error(model: ChatInferScale) -> None:
    picture = {"type": "image", "url": "https://example.com/cat.png"}
    with pytest.raises(PromptError, match="reads text only"):
        model.invoke([HumanMessage([{"type": "text", "text": "Who is this?"}, picture])], ADA)
    with pytest.raises(PromptError, match="no part of a conversation"):
        model.invoke([RemoveMessage("1"), HumanMessage("Hi")], ADA)


# -- messages and tokens -----------------------------------------------------------------------------------------


def test_every_kind_of_message_is_in_the_prompt(engine: WatchedEngine) -> None:
    model: BaseChatModel = ChatInferScale(engine=engine, max_tokens=2)
    call = {"name": "weather", "args": {"city": "Porto"}, "id": "1", "type": "tool_call"}
    model.invoke(
        [
            SystemMessage("Be brief."),
            HumanMessage([{"type": "text", "text": "Is it raining?"}, "In Porto?"], name="ada"),
            AIMessage(
                [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "1"}], tool_calls=[call]
            ),
            ToolMessage([{"type": "text", "text": "It pours."}], tool_call_id="1", name="weather"),
        ]
    )
    for words in ("Be brief.", "Is it raining?", "In Porto?", "I look.", "weather", "It pours."):
        assert words in asked(engine)


def test_tokens_are_counted_by_the_engines_tokenizer(engine: WatchedEngine) -> None:
    model = ChatInferScale(engine=engine)
    text = "Ada lives in Porto"
    assert engine.tokenizer.decode(model.get_token_ids(text)) == text
    assert model.get_num_tokens(text) == len(engine.tokenizer(text, add_special_tokens=False)["input_ids"])
    counted = model.get_num_tokens_from_messages([HumanMessage(text)])
    answer = model.invoke([HumanMessage(text)], max_tokens=1)
    assert answer.usage_metadata is not None
    assert counted == answer.usage_metadata["input_tokens"]


def test_how_tokens_are_drawn_reaches_the_engine(engine: WatchedEngine) -> None:
    model = ChatInferScale(engine=engine, temperature=0.7, max_tokens=3, top_p=0.9, seed=5, stop=["x"])
    model.invoke("Hi")
    options = engine.asked[-1][1]
    assert (options.temperature, options.max_tokens, options.top_p) == (0.7, 3, 0.9)
    assert (options.seed, options.stop) == (5, ("x",))
    model.bind(temperature=0.0).invoke("Hi", stop=["y"], max_tokens=2)
    options = engine.asked[-1][1]
    assert (options.temperature, options.max_tokens, options.stop, options.seed) == (0.0, 2, ("y",), 5)


@pytest.mark.parametrize("how", ["bind", "bind-behind-another", "with_config"])
def test_ids_that_were_bound_stay_with_whatever_is_made_of_the_model(filled: Memory, how: str) -> None:
    """LangChain's own binding forgets what it was told: the answer would be the constructor's user's."""
    ben = ChatInferScale(memory=filled, user_id="ben", max_tokens=8)
    ada: Any = {
        "bind": lambda: ben.bind(user_id="ada"),
        "bind-behind-another": lambda: ben.bind(temperature=0.0).bind(user_id="ada"),
        "with_config": lambda: ben.with_config({"configurable": {"user_id": "ada"}}),
    }[how]()
    form = {
        "title": "Verdict",
        "type": "object",
        "properties": {"guilty": {"type": "boolean"}},
        "required": ["guilty"],
    }
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    answers = [
        ada.invoke(QUESTION),
        ada.bind_tools([tool]).invoke(QUESTION),
        ada.bind_tools([tool]).bind(stop=["x"]).invoke(QUESTION),
        *(
            ada.with_structured_output(form, method=method, include_raw=True).invoke(QUESTION)["raw"]
            for method in ("json_schema", "function_calling")
        ),
    ]
    for answer in answers:
        assert recalled(answer) == set(FACTS)
    assert recalled(ben.invoke(QUESTION)) == {SECRET}
    assert recalled(ada.invoke(QUESTION, {"configurable": {"user_id": "ben"}})) == (
        {SECRET} if how == "with_config" else set(FACTS)
    )


def test_a_stream_is_of_whoever_asked_for_it_and_not_of_whoever_reads_it(model: ChatInferScale) -> None:
    asked_for: list[Any] = []
    RunnableLambda(lambda _: asked_for.append(model.stream(QUESTION))).invoke(None, ADA)
    read: Any = RunnableLambda(lambda _: list(asked_for[0])).invoke(
        None, {"configurable": {"user_id": "ben"}}
    )
    assert recalled(read[-1]) == set(FACTS)
    RunnableLambda(lambda _: asked_for.append(model.astream(QUESTION))).invoke(None, ADA)

    async def others() -> list[Any]:
        async def reading(_: Any) -> list[Any]:
            return [piece async for piece in asked_for[1]]

        return await RunnableLambda(reading).ainvoke(None, {"configurable": {"user_id": "ben"}})

    assert recalled(asyncio.run(others())[-1]) == set(FACTS)


# -- conversations that do not end with the user's words ---------------------------------------------------------

CALL = AIMessage("", tool_calls=[{"name": "look", "args": {}, "id": "1"}])
RESULT = ToolMessage("3", tool_call_id="1")


@pytest.mark.parametrize(
    ("messages", "recalls"),
    [
        ([SystemMessage(QUESTION)], True),
        ([SystemMessage("Be brief."), SystemMessage(QUESTION)], True),
        ([ChatMessage(role="developer", content=QUESTION)], True),
        ([HumanMessage("Hello"), AIMessage("Hello"), SystemMessage("Now sum up.")], True),
        ([SystemMessage(QUESTION), CALL, RESULT], True),
        ([CALL, RESULT], False),
        ([RESULT], False),
    ],
    ids=[
        "instructions",
        "two of them",
        "a developer's",
        "instructions last",
        "instructions and a result",
        "a call and a result",
        "a result alone",
    ],
)
def test_instructions_and_results_alone_are_answered(
    model: ChatInferScale, engine: WatchedEngine, messages: list[Any], recalls: bool
) -> None:
    answer = model.invoke(messages, ADA)
    assert answer.content
    assert bool(answer.response_metadata["memories"]) is recalls
    assert ChatInferScale(engine=engine, max_tokens=4).invoke(messages).content
    assert asyncio.run(model.ainvoke(messages, ADA)).content == answer.content


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ([SystemMessage(" ")], "empty"),
        ([HumanMessage("")], "empty"),
        ([HumanMessage("Hello"), AIMessage("Hello")], "nobody answers"),
    ],
    ids=["nothing", "blank instructions", "a blank question", "an answer last"],
)
def test_where_nothing_is_asked_an_error_says_so(
    model: ChatInferScale, engine: WatchedEngine, messages: list[Any], words: str
) -> None:
    for each in (model, ChatInferScale(engine=engine)):
        with pytest.raises(PromptError, match=words):
            each.invoke(messages, ADA)
