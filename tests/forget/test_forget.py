"""What is deleted or reworded leaves prompts, blobs, and the windows of other blobs."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from inferscale_memory.facts.scope import said_tag
from inferscale_memory.memory import Memory
from tests.memory.conftest import OpenMemory
from tests.memory.saying import ADA, BEN, MAY, WINDOWS, injected, say, texts
from tests.memory.test_faces import Extractor
from tests.memory.watched import WatchedEngine

STORY = ("I bought a red bicycle", "It was stolen in Lisbon", "The police found it again")
QUESTION = "What about the bicycle?"


def composed_keys(memory: Memory, **who: str) -> dict[str, str | None]:
    """Text of each recalled memory -> the blob key it is injected with."""
    prepared = memory.prepare(QUESTION, **(who or ADA))
    order = reversed(prepared.memories)
    return {memory.text: part.key for memory, part in zip(order, prepared.prompt.segments[1:-1], strict=True)}


def test_a_deleted_fact_is_not_in_a_later_prompt(memory: Memory, engine: WatchedEngine) -> None:
    first, *_ = say(memory, *STORY)
    memory.flush()
    assert STORY[0] in injected(memory.chat(QUESTION, **ADA, max_tokens=2))
    memory.delete(first)
    prepared = memory.prepare(QUESTION, **ADA)
    assert STORY[0] not in [m.text for m in prepared.memories]
    assert STORY[0] not in engine.tokenizer.decode(prepared.prompt.ids)


def test_its_blob_and_its_tag_are_forgotten_by_the_engine(memory: Memory, engine: WatchedEngine) -> None:
    *_, last = say(memory, *STORY)
    memory.flush()
    key = composed_keys(memory)[STORY[2]]
    tag = memory.prepare(QUESTION, **ADA).prompt.segments[-2].tag or ""
    tags = {part.tag for part in memory.prepare(QUESTION, **ADA).prompt.segments}
    assert key is not None
    assert tag in tags
    memory.delete(last)
    [(owner, keys, dead)] = engine.forgotten
    assert (owner, keys) == ("user:ada", (key,))
    assert len(dead) == 2, "itself, and the prompts of extraction it may have stood in"
    assert said_tag("user:ada") in dead
    assert len(set(dead) & tags) == 1
    assert engine.at_hand("user:ada", [key]) == set()


def test_facts_whose_window_held_it_are_encoded_again_without_it(
    open_memory: OpenMemory, engine: WatchedEngine
) -> None:
    memory = open_memory(injection=WINDOWS)
    first, *_ = say(memory, *STORY)
    memory.flush()
    before = composed_keys(memory)
    engine.encoded.clear()
    memory.delete(first)
    assert engine.at_hand("user:ada", [key for key in before.values() if key]) == set()
    memory.flush()
    [request] = engine.encoded_facts
    assert [text.count(story) for story, text in zip(STORY[1:], engine.texts(request), strict=True)] == [1, 1]
    assert STORY[0] not in engine.text(request)
    after = composed_keys(memory)
    assert set(after) == set(STORY[1:])
    assert set(after.values()).isdisjoint(before.values())
    assert set(injected(memory.chat(QUESTION, **ADA, max_tokens=2))) == set(STORY[1:])


def test_facts_said_before_it_keep_their_blobs(memory: Memory, engine: WatchedEngine) -> None:
    *_, last = say(memory, *STORY)
    memory.flush()
    before = composed_keys(memory)
    engine.encoded.clear()
    memory.delete(last)
    memory.flush()
    assert engine.encoded == []
    assert composed_keys(memory) == {text: before[text] for text in STORY[:2]}


def test_other_owners_are_not_touched(memory: Memory, engine: WatchedEngine) -> None:
    [mine] = say(memory, STORY[0], **ADA)
    say(memory, STORY[0], **BEN)
    memory.flush()
    before = composed_keys(memory, **BEN)
    memory.delete(mine)
    assert composed_keys(memory, **BEN) == before
    assert {owner for owner, _, _ in engine.forgotten} == {"user:ada"}


def test_the_turn_that_said_only_this_is_taken_from_the_log(memory: Memory, tmp_path: Path) -> None:
    first, *_ = say(memory, *STORY)
    memory.delete(first)
    db = sqlite3.connect(tmp_path / "memory" / "journal.sqlite")
    assert [row[0] for row in db.execute("SELECT text FROM turns ORDER BY ordinal")] == list(STORY[1:])
    assert [row[0] for row in db.execute("SELECT text FROM facts ORDER BY place")] == list(STORY[1:])
    db.close()


def test_an_update_is_injected_in_its_new_words(memory: Memory, engine: WatchedEngine) -> None:
    first, *_ = say(memory, *STORY)
    memory.flush()
    old = composed_keys(memory)[STORY[0]]
    engine.encoded.clear()
    memory.update(first, "I bought a blue bicycle")
    memory.flush()
    reply = memory.chat(QUESTION, **ADA, max_tokens=2)
    assert set(injected(reply)) == {"I bought a blue bicycle", *STORY[1:]}
    assert engine.at_hand("user:ada", [old or ""]) == set()
    assert not any(STORY[0] in engine.text(request) for request in engine.encoded_facts)


def test_an_update_of_metadata_alone_keeps_the_blob(memory: Memory, engine: WatchedEngine) -> None:
    first, *_ = say(memory, *STORY)
    memory.flush()
    before = composed_keys(memory)
    memory.update(first, metadata={"kind": "vehicle"})
    assert composed_keys(memory) == before
    assert engine.forgotten == []


def test_delete_all_leaves_nothing_and_asks_for_no_encode(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, *STORY)
    say(memory, "I am Ben", **BEN)
    memory.flush()
    engine.encoded.clear()
    memory.delete_all(**ADA)
    memory.flush()
    assert memory.chat(QUESTION, **ADA, max_tokens=2).memories == ()
    assert texts(memory.chat(QUESTION, **BEN, max_tokens=2)) == ["I am Ben"]
    assert engine.encoded == []
    assert len(engine.forgotten) == 1


def test_reset_forgets_everybody(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, *STORY)
    say(memory, "I am Ben", **BEN)
    memory.flush()
    keys = {owner: list(composed_keys(memory, **who).values()) for owner, who in (("a", ADA), ("b", BEN))}
    memory.reset()
    assert memory.chat(QUESTION, **ADA, max_tokens=2).memories == ()
    assert engine.at_hand("user:ada", [key for key in keys["a"] if key]) == set()
    assert engine.at_hand("user:ben", [key for key in keys["b"] if key]) == set()
    say(memory, "A new beginning")
    memory.flush()
    assert injected(memory.chat(QUESTION, **ADA, max_tokens=2)) == ["A new beginning"]


def test_an_encode_that_ends_after_its_fact_was_deleted_is_discarded(
    memory: Memory, engine: WatchedEngine
) -> None:
    [fact] = say(memory, "warm up")
    memory.flush()
    engine.before_return = lambda: _once(engine, lambda: memory.delete(doomed[0]))
    engine.gate.clear()
    doomed = say(memory, "doomed fact", "innocent fact", at="2024-09-01")
    engine.gate.set()
    memory.flush()
    late = [keys for _, keys, _ in engine.forgotten if keys]
    assert late, "the blobs of the encode under way were dropped"
    assert "doomed fact" not in engine.text(engine.encoded_facts[-1])
    assert set(injected(memory.chat("Which fact?", **ADA, max_tokens=2))) == {"warm up", "innocent fact"}
    assert fact in [m.id for m in memory.prepare("Which fact?", **ADA).memories]


def _once(engine: WatchedEngine, act: object) -> None:
    engine.before_return = lambda: None
    assert callable(act)
    act()


def test_cached_blocks_with_a_turn_that_made_no_fact_are_forgotten_with_what_it_says(
    open_memory: OpenMemory, engine: WatchedEngine
) -> None:
    memory = open_memory(injection=WINDOWS)
    [fact] = say(memory, STORY[0])
    memory.llm = Extractor()
    memory.add(f"You know, {STORY[0]}!", **ADA, timestamp=MAY)
    say(memory, STORY[1])
    memory.flush()
    [turn] = {tag for tag, _ in engine.encoded_facts[-1].mentions} - {
        part.tag for part in memory.prepare(QUESTION, **ADA).prompt.segments
    }
    assert "You know" in engine.text(engine.encoded_facts[-1])
    memory.delete(fact)
    assert turn in {tag for _, _, tags in engine.forgotten for tag in tags}
    memory.flush()
    assert "You know" not in engine.text(engine.encoded_facts[-1])


def test_deleting_does_not_start_an_engine(open_memory: OpenMemory, model: Path) -> None:
    memory = open_memory(engine=None, llm={"provider": "openai", "config": {"api_key": "none"}})
    [fact] = say(memory, "short lived")
    memory.delete(fact)
    assert memory._core is not None
    assert memory._core.engine.started is None


def test_deleting_what_does_not_exist_is_mem0s_own_error(memory: Memory) -> None:
    with pytest.raises(ValueError, match="not found"):
        memory.delete("00000000-0000-0000-0000-000000000000")
