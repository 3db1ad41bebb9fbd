"""A conversation keeps its composition and grows by appending, or is composed anew where that is less to prefill."""

from __future__ import annotations

import pytest

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.errors import ContextOverflowError, PromptError
from inferscale_memory.memory import ChatSession, Memory
from inferscale_memory.memory.session import _unended
from inferscale_memory.prompt import Prompt, PromptTemplate
from inferscale_memory.recall.continuation import turn_ids
from inferscale_memory.recall.results import Reply
from tests.memory.saying import ADA, injected, say, texts
from tests.memory.watched import WatchedEngine
from tests.models import tiny_tokenizer

SHORT = SamplingOptions(max_tokens=5)


class Talk:
    """A session whose prompts are kept, turn by turn."""

    def __init__(self, session: ChatSession) -> None:
        self.session = session
        self.prompts: list[Prompt] = []
        self.answers: list[tuple[int, ...]] = []

    def ask(self, text: str) -> Reply:
        reply = self.session.chat(text, options=SHORT)
        assert self.session._kept is not None
        self.prompts.append(self.session._kept.prepared.prompt)
        self.answers.append(self.session._kept.answer)
        return reply


@pytest.fixture
def talk(memory: Memory) -> Talk:
    say(memory, "My cat is called Miso", "I live in Porto", "My sister is a nurse")
    memory.flush()
    return Talk(memory.session(**ADA, k=1, sticky=True))


@pytest.fixture
def frugal(memory: Memory) -> Talk:
    """One that goes on or is composed anew, whichever leaves less to prefill."""
    say(memory, "My cat is called Miso", "I live in Porto, in a house with a garden and nine windows")
    memory.flush()
    return Talk(memory.session(**ADA, k=1))


def goes_on(talk: Talk) -> bool:
    """Whether the last prompt begins with all of the one before."""
    before, after = talk.prompts[-2:]
    return after.ids[: len(before.ids)] == before.ids


def test_a_turn_that_recalls_more_than_was_said_is_composed_anew(frugal: Talk, engine: WatchedEngine) -> None:
    frugal.ask("What is my cat called?")
    reply = frugal.ask("Where do I live?")
    assert not goes_on(frugal)
    assert len(injected(reply)) == 1
    assert "garden" in injected(reply)[0]
    text = engine.tokenizer.decode(frugal.prompts[1].ids)
    assert text.index("garden") < text.index("What is my cat called?") < text.index("Where do I live?")
    left = [len(p.ids) - sum(len(s.ids) for s in p.composition) for p in frugal.prompts]
    assert reply.completion.prefilled_tokens == left[1]


def test_a_turn_that_recalls_less_than_was_said_goes_on(frugal: Talk, engine: WatchedEngine) -> None:
    frugal.ask(f"What is my cat called? {'Purr ' * 80}")
    reply = frugal.ask("Where do I live?")
    assert goes_on(frugal)
    assert injected(reply) == ["My cat is called Miso"]
    assert len(texts(reply)) == 2


def test_a_turn_that_recalls_nothing_new_goes_on(frugal: Talk) -> None:
    frugal.ask("What is my cat called?")
    frugal.ask("Is my cat really called that?")
    assert goes_on(frugal)


def test_where_nothing_is_injected_a_turn_goes_on(frugal: Talk) -> None:
    for question in ("What is my cat called?", "Where do I live?"):
        frugal.session.chat(question, options=SHORT, inject=False)
        assert frugal.session._kept is not None
        frugal.prompts.append(frugal.session._kept.prepared.prompt)
    assert goes_on(frugal)
    *_, last = frugal.session.stream("And what is it called, my cat?", options=SHORT, inject=False)
    frugal.prompts.append(frugal.session._kept.prepared.prompt)
    assert goes_on(frugal)
    assert last.reply is not None


def test_without_blobs_a_turn_goes_on(memory: Memory, engine: WatchedEngine) -> None:
    engine.gate.clear()  # nothing is encoded
    say(memory, "My cat is called Miso", "I live in Porto, in a house with a garden and nine windows")
    talk = Talk(memory.session(**ADA, k=1))
    talk.ask("What is my cat called?")
    talk.ask("Where do I live?")
    assert goes_on(talk)
    engine.gate.set()


def test_a_turn_begins_with_all_ids_of_the_turn_before(talk: Talk) -> None:
    for question in ("What is my cat called?", "Thanks! And I, where do I live?", "And what is my sister?"):
        talk.ask(question)
    for before, answer, after in zip(talk.prompts, talk.answers, talk.prompts[1:], strict=False):
        grown = before.ids + list(answer)
        assert after.ids[: len(grown)] == grown
        assert len(after.ids) > len(grown)


def test_the_composition_stays(talk: Talk) -> None:
    talk.ask("What is my cat called?")
    talk.ask("Where do I live?")
    one, two = talk.prompts
    assert one.composition == two.composition
    assert one.composition


def test_what_is_newly_recalled_is_appended_as_text(talk: Talk, engine: WatchedEngine) -> None:
    first = talk.ask("What is my cat called?")
    second = talk.ask("Where do I live?")
    assert injected(first) == injected(second) == ["My cat is called Miso"]
    assert texts(second) == ["I live in Porto", "My cat is called Miso"]
    added = engine.tokenizer.decode(talk.prompts[1].ids[len(talk.prompts[0].ids) :])
    assert "I live in Porto" in added
    assert added.index("I live in Porto") < added.index("Where do I live?")


def test_what_is_recalled_again_is_not_repeated(talk: Talk, engine: WatchedEngine) -> None:
    talk.ask("What is my cat called?")
    talk.ask("Is my cat really called that?")
    assert engine.tokenizer.decode(talk.prompts[1].ids).count("Miso") == 1


def test_appended_memories_carry_their_tags(talk: Talk, memory: Memory) -> None:
    talk.ask("What is my cat called?")
    talk.ask("Where do I live?")
    tags = {part.tag for part in memory.prepare("?", **ADA).prompt.segments} - {None}
    assert len({part.tag for part in talk.prompts[1].segments} & tags) == 2


def test_the_appended_prompt_is_the_conversation_as_the_template_writes_it(
    talk: Talk, memory: Memory, engine: WatchedEngine
) -> None:
    talk.ask("What is my cat called?")
    talk.ask("Is my cat grey?")
    [_, assistant, _, _] = talk.session.messages
    text = engine.tokenizer.decode(talk.prompts[1].ids)
    answer = engine.tokenizer.decode(talk.answers[0])
    assert text.endswith(
        f"<|im_start|>assistant\n{answer}<|im_end|>\n"
        "<|im_start|>user\nIs my cat grey?<|im_end|>"
        "\n<|im_start|>assistant\n"
    )
    assert assistant["role"] == "assistant"


def test_messages_only_grow(talk: Talk) -> None:
    talk.ask("What is my cat called?")
    first = list(talk.session.messages)
    talk.ask("Where do I live?")
    assert talk.session.messages[:2] == first
    assert [m["content"] for m in talk.session.messages if m["role"] == "user"] == [
        "What is my cat called?",
        "Where do I live?",
    ]


def test_recomposing_puts_what_is_recalled_now_before_the_conversation(
    talk: Talk, engine: WatchedEngine
) -> None:
    talk.ask("What is my cat called?")
    talk.session.recompose()
    reply = talk.ask("Where do I live?")
    assert injected(reply) == ["I live in Porto"]
    text = engine.tokenizer.decode(talk.prompts[1].ids)
    assert (
        text.index("I live in Porto") < text.index("What is my cat called?") < text.index("Where do I live?")
    )


def test_a_memory_that_is_deleted_leaves_the_conversations_prompt(
    talk: Talk, memory: Memory, engine: WatchedEngine
) -> None:
    reply = talk.ask("What is my cat called?")
    memory.delete(reply.memories[0].id)
    talk.ask("Where do I live?")
    assert "My cat is called Miso" not in engine.tokenizer.decode(talk.prompts[1].ids)


def test_a_memory_that_is_reworded_is_reworded_in_the_conversation(
    talk: Talk, memory: Memory, engine: WatchedEngine
) -> None:
    reply = talk.ask("What is my cat called?")
    memory.update(reply.memories[0].id, "My cat is called Tofu")
    talk.ask("What is my cat called?")
    text = engine.tokenizer.decode(talk.prompts[1].ids)
    assert "Tofu" in text
    assert "Miso" not in text


def test_a_conversation_that_fills_the_context_is_composed_anew(
    memory: Memory, engine: WatchedEngine
) -> None:
    say(memory, "My cat is called Miso", "long " * (engine.max_model_len // 8))
    memory.flush()
    talk = Talk(memory.session(**ADA, k=1))
    talk.ask("What is my cat called?")
    talk.ask("word " * (engine.max_model_len // 5))
    reply = talk.ask("What is long long long long?")
    assert len(talk.prompts[2].ids) + SHORT.max_tokens <= engine.max_model_len
    assert reply.memories or reply.dropped


def test_it_can_be_streamed(talk: Talk) -> None:
    talk.ask("What is my cat called?")
    *_, last = talk.session.stream("Where do I live?", options=SHORT)
    assert last.reply is not None
    assert last.reply.completion.injected_tokens > 0
    assert talk.session.messages[-1] == {"role": "assistant", "content": last.reply.text}


def test_an_empty_turn_is_refused_before_the_stream_is_read(talk: Talk) -> None:
    with pytest.raises(PromptError):
        talk.session.stream("")


def test_a_memory_the_journal_does_not_know_yet_is_not_kept_in_the_conversation(memory: Memory) -> None:
    """It might be deleted before anybody notices."""
    payload = {"data": "I came from elsewhere", "user_id": "ada", "created_at": "2024-05-12"}
    vector, name = memory.embedding_model.embed(payload["data"]), "11111111-1111-1111-1111-111111111111"
    memory.vector_store._inner.insert(vectors=[vector], payloads=[payload], ids=[name])
    talk = Talk(memory.session(**ADA))
    assert texts(talk.ask("From where?")) == ["I came from elsewhere"]
    memory.flush()
    memory.delete(name)
    assert texts(talk.ask("Really?")) == []


def test_chat_can_be_given_a_session(talk: Talk, memory: Memory) -> None:
    memory.chat("What is my cat called?", session=talk.session, max_tokens=3)
    memory.chat("Where do I live?", session=talk.session, max_tokens=3)
    assert len(talk.session.messages) == 4


def test_it_may_begin_with_a_system_text(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, "I like tea")
    memory.flush()
    talk = Talk(memory.session(**ADA, system="You are a butler."))
    assert injected(talk.ask("What do I like?")) == ["I like tea"]
    talk.ask("Anything else?")
    assert engine.tokenizer.decode(talk.prompts[1].ids).count("You are a butler.") == 1


def test_somebody_new_can_talk_too(memory: Memory) -> None:
    talk = Talk(memory.session(user_id="nobody"))
    talk.ask("Hello")
    talk.ask("Hello again")
    one, two = talk.prompts
    assert two.ids[: len(one.ids)] == one.ids


def test_an_empty_turn_is_an_error_and_leaves_no_trace(talk: Talk) -> None:
    with pytest.raises(PromptError):
        talk.ask("  ")
    assert talk.session.messages == []


def test_a_model_without_a_chat_template_can_be_continued() -> None:
    bare = tiny_tokenizer().__class__(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="<|im_end|>"
    )
    ids = turn_ids(PromptTemplate(bare), "And then?")
    assert ids is not None
    assert bare.decode(ids) == "\nUser: And then?\nAssistant:"


def test_an_answer_that_ended_by_itself_is_ended_once() -> None:
    tokenizer = tiny_tokenizer()
    end, special = tokenizer.eos_token_id, tokenizer.all_special_ids
    assert _unended((70, 71, end), special) == (70, 71)
    assert _unended((70, 71), special) == (70, 71)
    assert _unended((), special) == ()
    turn = turn_ids(PromptTemplate(tokenizer), "And then?")
    assert turn is not None
    assert turn[0] == end


def test_a_conversation_that_outgrows_the_context_lets_go_of_its_oldest_turns(
    memory: Memory, engine: WatchedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    say(memory, "My cat is called Miso")
    session = memory.session(**ADA, system="Answer in rhyme.")
    long = "word " * (engine.max_model_len // 12)
    replies = [session.chat(f"Question {number}? {long}", options=SHORT) for number in range(20)]
    left_out = [reply.left_out for reply in replies]
    assert left_out[0] == 0
    assert left_out == sorted(left_out)
    assert 0 < left_out[-1] < len(session.messages)
    assert len(set(left_out)) < 15, "several turns are let go at once, so that the next can go on"
    assert session._kept is not None
    prompt = engine.tokenizer.decode(session._kept.prepared.prompt.ids)
    assert "Answer in rhyme." in prompt
    assert "Question 19?" in prompt
    assert "Question 0?" not in prompt
    assert [record.name for record in caplog.records if "outgrown" in record.message] == [
        "inferscale_memory.memory.session"
    ]
    assert len(session.messages) == 41, "what was said stays in the log"


def test_a_question_that_is_too_long_alone_is_still_refused_and_the_next_one_answered(
    memory: Memory, engine: WatchedEngine
) -> None:
    session = memory.session(**ADA)
    session.chat("What is my cat called?", options=SHORT)
    with pytest.raises(ContextOverflowError):
        session.chat("word " * engine.max_model_len, options=SHORT)
    assert session.chat("And now?", options=SHORT).left_out == 0


def test_a_turn_takes_the_options_of_chat(memory: Memory) -> None:
    say(memory, "My cat is called Miso", "I live in Porto", "I like tea")
    memory.add("I like cake", **ADA, metadata={"mood": "good"}, infer=False)
    session = memory.session(**ADA, k=1)
    assert len(session.chat("What is my cat called?", max_tokens=3).completion.token_ids) <= 3
    session.recompose()
    assert len(session.chat("Where do I live?", k=3, max_tokens=3).memories) == 3
    session.recompose()
    assert texts(session.chat("What?", filters={"mood": "good"}, max_tokens=3)) == ["I like cake"]
    session.recompose()
    found = memory.search("tea", filters=ADA, top_k=1, threshold=0.0)["results"]
    assert texts(session.chat("What?", memories=found, max_tokens=3)) == [found[0]["memory"]]
    *_, last = session.stream("What?", max_tokens=2, options=SHORT)
    assert last.reply is not None
    assert len(last.reply.completion.token_ids) <= 2
    assert memory.chat("What?", session=session, k=0, max_tokens=1).completion


def test_a_turn_may_call_a_tool_and_the_next_bring_its_result(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, "My cat is called Miso")
    tools = [{"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}]
    session = memory.session(**ADA)
    reply = session.chat("What is my cat called?", tools=tools, tool_choice="look", max_tokens=60)
    assert [call.name for call in reply.tool_calls] == ["look"]
    assert session.messages[-1]["tool_calls"][0]["function"]["name"] == "look"
    result = {"role": "tool", "content": "It is called Tofu.", "tool_call_id": reply.tool_calls[0].id}
    session.chat([result], tools=tools, max_tokens=4)
    assert session._kept is not None
    assert "It is called Tofu." in engine.tokenizer.decode(session._kept.prepared.prompt.ids)
    assert session.chat("And mine?", max_tokens=4).text is not None
    roles = [message["role"] for message in session.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
