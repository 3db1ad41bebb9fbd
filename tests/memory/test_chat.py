"""From `add` to an answer: what is injected, what goes as text, and what never enters a prompt."""

from __future__ import annotations

import pytest

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.errors import ConfigurationError, PromptError
from inferscale_memory.memory import Memory
from inferscale_memory.prompt import Prompt
from tests.memory.conftest import OpenMemory
from tests.memory.saying import ADA, BEN, injected, say, texts
from tests.memory.watched import WatchedEngine

FACTS = ("My cat is called Miso", "I moved to Porto", "My sister is a nurse")


def words(engine: WatchedEngine, prompt: Prompt) -> str:
    return str(engine.tokenizer.decode(prompt.ids))


def test_what_was_said_is_injected(memory: Memory) -> None:
    say(memory, *FACTS)
    memory.flush()
    prepared = memory.prepare("What is my cat called?", **ADA)
    reply = memory.chat("What is my cat called?", **ADA, max_tokens=4)
    assert set(injected(reply)) == set(FACTS)
    assert reply.completion.injected_tokens == sum(len(part.ids) for part in prepared.prompt.segments[:-1])
    assert reply.completion.prefilled_tokens == len(prepared.prompt.segments[-1].ids)
    assert reply.completion.refused is None
    assert reply.completion.token_ids


def test_the_most_relevant_stands_nearest_to_the_question(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, *FACTS)
    prompt = memory.prepare("What is my cat called?", **ADA).prompt
    text = words(engine, prompt)
    assert max(text.index(fact) for fact in FACTS) == text.index(FACTS[0])
    assert text.index(FACTS[0]) < text.index("What is my cat called?")


def test_memories_stand_as_they_were_said_where_that_is_asked_for(
    open_memory: OpenMemory, engine: WatchedEngine
) -> None:
    memory = open_memory(injection={"order": "chronological"})
    say(memory, FACTS[1], at="2024-03-01")
    say(memory, FACTS[2], FACTS[0], at="2024-01-01")
    memory.flush()
    prepared = memory.prepare("What is my cat called?", **ADA)
    text = words(engine, prepared.prompt)
    assert sorted(FACTS, key=text.index) == [FACTS[2], FACTS[0], FACTS[1]]
    assert prepared.memories[0].text == FACTS[0], "the most relevant first, wherever it stands"
    assert all(memory.injected for memory in prepared.memories)
    with pytest.raises(ConfigurationError, match="best_last, chronological"):
        open_memory(injection={"order": "random"})


def test_memories_stand_by_session_the_most_relevant_ones_last(
    open_memory: OpenMemory, engine: WatchedEngine
) -> None:
    memory = open_memory(injection={"order": "sessions"})
    say(memory, "My cat is grey", "I moved to Porto", at="2024-03-01")
    say(memory, "I like rain", at="2024-04-01")
    say(memory, "My sister plays the cello", "What is my cat called? Miso", at="2024-01-01")
    memory.flush()
    memory.chat("What is my cat called?", **ADA, max_tokens=2)
    text = words(engine, engine.asked[-1][0])
    said = ["I like rain", "My cat is grey", "I moved to Porto", "My sister plays", "called? Miso"]
    assert sorted(said, key=text.index) == said


def test_a_budget_of_tokens_leaves_out_the_least_relevant(open_memory: OpenMemory) -> None:
    memory = open_memory(injection={"max_memory_tokens": 60, "top_k": 50})
    say(memory, *FACTS, *(f"I have a plant, it is number {number}" for number in range(12)))
    memory.flush()
    prepared = memory.prepare("What is my cat called?", **ADA)
    assert prepared.memories[0].text == FACTS[0]
    assert len(prepared.memories) + len(prepared.dropped) == len(FACTS) + 12
    facts = [segment for segment in prepared.prompt.segments if segment.tag]
    assert 30 < sum(len(segment.ids) for segment in facts) <= 60


def test_the_text_path_has_the_very_same_ids(memory: Memory) -> None:
    say(memory, *FACTS)
    memory.flush()
    as_text = memory.prepare("What is my cat called?", **ADA).prompt.as_text()
    assert as_text.ids == memory.prepare("What is my cat called?", **ADA).prompt.ids
    reply = memory.chat("What is my cat called?", **ADA, max_tokens=4, inject=False)
    assert reply.completion.injected_tokens == 0
    assert reply.completion.prefilled_tokens == len(as_text.ids)
    assert injected(reply) == []
    assert set(texts(reply)) == set(FACTS)


def test_memories_in_their_own_context_answer_as_text_does(memory: Memory) -> None:
    """Recalled whole, in the order they were said, behind the preamble they were encoded behind: exact."""
    say(memory, "The one and only")
    memory.flush()
    options = SamplingOptions(logprobs=5)
    path = [
        memory.chat("What?", **ADA, max_tokens=3, inject=inject, options=options) for inject in (True, False)
    ]
    assert path[0].completion.injected_tokens > 0
    assert path[0].completion.token_ids == path[1].completion.token_ids
    for one, other in zip(*(reply.completion.logprobs or () for reply in path), strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_a_question_right_after_add_has_the_memory_as_text(memory: Memory, engine: WatchedEngine) -> None:
    engine.gate.clear()
    say(memory, *FACTS)
    reply = memory.chat("What is my cat called?", **ADA, max_tokens=2)
    assert set(texts(reply)) == set(FACTS)
    assert injected(reply) == []
    engine.gate.set()
    memory.flush()
    assert set(injected(memory.chat("What is my cat called?", **ADA, max_tokens=2))) == set(FACTS)


def test_somebody_of_whom_nothing_is_remembered_is_answered_without_memory(
    memory: Memory, engine: WatchedEngine
) -> None:
    say(memory, *FACTS)
    prepared = memory.prepare("Who am I?", **BEN)
    assert memory.chat("Who am I?", **BEN, max_tokens=2).memories == ()
    assert "remember" not in words(engine, prepared.prompt)
    assert "Who am I?" in words(engine, prepared.prompt)


def test_another_users_memories_never_enter(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, "Ada's secret is blue", **ADA)
    say(memory, "Ben's secret is red", **BEN)
    memory.flush()
    mine, theirs = (memory.prepare("What is the secret?", **who).prompt for who in (ADA, BEN))
    assert "blue" in words(engine, mine)
    assert "red" not in words(engine, mine)
    public = {mine.segments[0].key}
    assert {part.key for part in mine.composition} & {part.key for part in theirs.composition} == public


def test_a_user_and_an_agent_of_one_name_are_two_owners(memory: Memory) -> None:
    say(memory, "I am the user", user_id="sam")
    say(memory, "I am the agent", agent_id="sam")
    memory.flush()
    user = memory.prepare("Who?", user_id="sam").prompt
    agent = memory.prepare("Who?", agent_id="sam").prompt
    assert user.owner != agent.owner
    assert len({part.key for part in (*user.composition, *agent.composition)}) == 3  # one preamble, two facts


def test_what_an_agent_heard_from_a_user_goes_as_text_when_the_agent_asks(memory: Memory) -> None:
    """mem0's filters match it; its blob is the user's."""
    say(memory, "I like tea", user_id="ada", agent_id="butler")
    memory.flush()
    assert injected(memory.chat("What does she like?", **ADA, max_tokens=2)) == ["I like tea"]
    assert memory.prepare("What does she like?", agent_id="butler").prompt.composition == ()
    reply = memory.chat("What does she like?", agent_id="butler", max_tokens=2)
    assert (texts(reply), injected(reply)) == (["I like tea"], [])


def test_as_many_memories_come_as_were_asked_for(memory: Memory) -> None:
    """Also those that have nothing to do with the question."""
    say(memory, *(f"word{number} thing{number}" for number in range(30)))
    assert len(memory.prepare("Something else entirely?", **ADA, k=30).memories) == 30
    assert len(memory.prepare("Something else entirely?", **ADA, k=7).memories) == 7
    assert memory.prepare("Something else entirely?", **ADA, k=0).memories == ()


def test_what_does_not_fit_is_left_out_and_said(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, *(f"Fact number {number} of many" for number in range(20)))
    memory.flush()
    everything = memory.prepare("Which fact number?", **ADA, k=20)
    room = engine.max_model_len - len(everything.prompt.ids) + 60
    prepared = memory.prepare("Which fact number?", **ADA, k=20, max_tokens=room)
    assert prepared.dropped
    assert len(prepared.memories) + len(prepared.dropped) == 20
    assert min(m.score for m in prepared.memories) >= max(m.score for m in prepared.dropped) - 1e-4
    assert len(prepared.prompt.composition) == 1 + len(prepared.memories)
    assert len(prepared.prompt.ids) + room <= engine.max_model_len


def test_the_reply_says_what_was_left_out(memory: Memory, engine: WatchedEngine) -> None:
    fits = engine.max_model_len // 40
    say(memory, "A short fact", "A very long fact " + "indeed " * (engine.max_model_len // 2))
    reply = memory.chat("Which fact?", **ADA, max_tokens=fits)
    assert [m.text for m in reply.dropped] != []
    assert texts(reply) == ["A short fact"]


def test_a_conversation_that_does_not_fit_alone_is_an_error(memory: Memory, engine: WatchedEngine) -> None:
    with pytest.raises(PromptError, match="room for"):
        memory.chat("word " * engine.max_model_len, **ADA)


@pytest.mark.parametrize("nothing", ["", "  \n", [], [{"role": "user", "content": ""}]])
def test_an_empty_question_is_an_error(memory: Memory, nothing: object) -> None:
    with pytest.raises(PromptError, match="empty"):
        memory.chat(nothing, **ADA)  # type: ignore[arg-type]


def test_a_question_without_a_scope_is_mem0s_own_error(memory: Memory) -> None:
    with pytest.raises(ValueError, match="filters must contain at least one of: user_id, agent_id, run_id"):
        memory.chat("Who am I?")


def test_mem0s_filters_narrow_what_is_recalled(memory: Memory) -> None:
    memory.add("tea is hot", **ADA, infer=False, metadata={"kind": "drink"})
    memory.add("toast is hot", **ADA, infer=False, metadata={"kind": "food"})
    reply = memory.chat("What is hot?", **ADA, filters={"kind": "food"}, max_tokens=2)
    assert texts(reply) == ["toast is hot"]


def test_a_streamed_answer_ends_with_the_same_reply(memory: Memory) -> None:
    say(memory, *FACTS)
    memory.flush()
    whole = memory.chat("What is my cat called?", **ADA, max_tokens=6)
    chunks = list(memory.chat("What is my cat called?", **ADA, max_tokens=6, stream=True))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.reply is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    reply = chunks[-1].reply
    assert reply is not None
    assert (reply.text, injected(reply)) == (whole.text, injected(whole))
    assert reply.completion.token_ids == whole.completion.token_ids


def test_time_to_first_token_includes_retrieval_and_composition(memory: Memory) -> None:
    say(memory, *FACTS)
    timings = memory.chat("What is my cat called?", **ADA, max_tokens=2).timings
    assert timings.ttft_s > timings.search_s + timings.compose_s > 0


def test_a_history_is_part_of_the_prompt_and_its_last_words_are_the_question(
    memory: Memory, engine: WatchedEngine
) -> None:
    say(memory, "I like tea", "My cat is Miso")
    conversation = [
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "content": "Good morning"},
        {"role": "user", "content": [{"type": "text", "text": "Who is my cat?"}]},
    ]
    prepared = memory.prepare(conversation, **ADA, k=1)
    assert [m.text for m in prepared.memories] == ["My cat is Miso"]
    assert "Good morning" in words(engine, prepared.prompt)


def test_an_apps_own_system_text_is_encoded_for_its_user_alone(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, "I like tea")
    memory.flush()
    messages = [
        {"role": "system", "content": "You serve Ada."},
        {"role": "user", "content": "What do I like?"},
    ]
    reply = memory.chat(messages, **ADA, max_tokens=2)
    assert injected(reply) == ["I like tea"]
    preamble = next(request for request in engine.encoded if "You serve Ada." in engine.text(request))
    assert preamble.owner == "user:ada"


def test_the_default_preamble_is_encoded_once_for_everybody(memory: Memory, engine: WatchedEngine) -> None:
    for who in (ADA, BEN):
        say(memory, "I like tea", **who)
        memory.flush()
        memory.chat("What do I like?", **who, max_tokens=2)
    assert [request.owner for request in engine.encoded].count("public") == 1


def test_the_most_relevant_can_be_prefilled_as_text(open_memory: OpenMemory) -> None:
    memory = open_memory(injection={"text_last": 1})
    say(memory, *FACTS)
    memory.flush()
    reply = memory.chat("What is my cat called?", **ADA, max_tokens=2)
    assert set(injected(reply)) == set(FACTS) - {"My cat is called Miso"}
    assert set(texts(reply)) == set(FACTS)


def test_a_blob_the_engine_has_lost_costs_time_only(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, *FACTS)
    memory.flush()
    before = memory.chat("What is my cat called?", **ADA, max_tokens=2)
    engine.forget("user:ada", _keys(memory))
    lost = memory.chat("What is my cat called?", **ADA, max_tokens=2)
    assert lost.completion.refused is not None
    assert injected(lost) == []
    assert lost.completion.prompt_tokens == before.completion.prompt_tokens
    memory.chat("What is my cat called?", **ADA, max_tokens=2)  # asks the engine, finds out, asks for encodes
    memory.flush()
    again = memory.chat("What is my cat called?", **ADA, max_tokens=2)
    assert set(injected(again)) == set(FACTS)
    assert again.completion.token_ids == before.completion.token_ids


def test_a_preamble_the_engine_has_lost_is_encoded_again(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, *FACTS)
    memory.flush()
    preamble = memory.prepare("What is my cat called?", **ADA).prompt.segments[0].key
    engine.forget("public", [preamble or ""])
    assert injected(memory.chat("What is my cat called?", **ADA, max_tokens=2)) == []
    assert set(injected(memory.chat("What is my cat called?", **ADA, max_tokens=2))) == set(FACTS)


def _keys(memory: Memory) -> list[str]:
    composition = memory.prepare("What is my cat called?", **ADA).prompt.composition
    return [part.key for part in composition[1:] if part.key is not None]


def test_most_tokens_are_an_upper_bound(memory: Memory, engine: WatchedEngine) -> None:
    """More than the context holds is no error, and drives no memory out."""
    say(memory, "My cat is called Miso")
    reply = memory.chat(
        "What is my cat called?", **ADA, max_tokens=100_000, options=SamplingOptions(stop=(" ",))
    )
    assert texts(reply) == ["My cat is called Miso"]
    assert memory.prepare("What is my cat called?", **ADA, max_tokens=engine.max_model_len - 1).dropped == ()
