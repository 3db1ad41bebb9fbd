"""The accuracy benchmark: what it measures is what it says, on a tiny random model and a conversation of our own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from benchmarks.accuracy import command, locomo
from benchmarks.accuracy.asking import Asker, arranged, score
from benchmarks.accuracy.blobs import Blobs
from benchmarks.accuracy.encodings import Material, encoding, pinned
from benchmarks.accuracy.judge import Judge
from benchmarks.accuracy.measures import (
    divergence,
    exact_match,
    mean_interval,
    nll,
    recovered,
    token_f1,
)
from benchmarks.accuracy.settings import NONE, Setting, grid
from benchmarks.accuracy.summary import rows
from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.engine.transformers import TransformersEngine
from inferscale_memory.errors import ConfigurationError, EngineError
from inferscale_memory.prompt import Prompt, PromptTemplate, Segment
from tests.memory.hashing import HashingEmbedder
from tests.models import tiny_model

SESSIONS = [
    ["I adopted a cat called Miso.", "A grey one?", "Yes, it sleeps on the radiator."],
    ["I moved from Lisbon to Porto.", "For the new job?", "As a nurse, at the hospital."],
    ["My sister will marry in June.", "Where?", "In Porto, near the river."],
]
QA = [
    ("What is the cat called?", "Miso", 4, ["D1:1"]),
    ("Where does the cat sleep?", "on the radiator", 4, ["D1:3"]),
    ("Where did Alice move?", "Porto", 1, ["D1:9; D2:1"]),
    ("When is the wedding?", "June", 2, ["D1:1", "D3:1"]),
    ("What does Alice not say?", "nothing", 5, []),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    talk: dict[str, Any] = {}
    for number, session in enumerate(SESSIONS, 1):
        talk[f"session_{number}_date_time"] = f"1:0{number} pm on {number} May, 2024"
        talk[f"session_{number}"] = [
            {"speaker": ("Alice", "Bob")[place % 2], "text": text, "dia_id": f"D{number}:{place + 1}"}
            for place, text in enumerate(session)
        ]
    qa = [
        {"question": text, "answer": answer, "category": category, "evidence": evidence}
        for text, answer, category, evidence in QA
    ]
    (folder / "conv-1.json").write_text(json.dumps({"conversation": talk, "qa": qa}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture
def engine(model: Path) -> Iterator[TransformersEngine]:
    with TransformersEngine(model, dtype="float32", device="cpu", blob_bytes=1 << 26) as engine:
        yield engine


@pytest.fixture
def conversation(data: Path) -> locomo.Conversation:
    [found] = locomo.load(data)
    return found


def asked(
    engine: TransformersEngine, conversation: locomo.Conversation, settings: list[Setting]
) -> tuple[dict[str, list[dict[str, Any]]], Asker]:
    asker = Asker(engine, HashingEmbedder(None), conversation, generate=False)
    found: dict[str, list[dict[str, Any]]] = {}
    for question in conversation.questions:
        for record in asker.ask(question, settings, set()):
            found.setdefault(record["setting"], []).append(record)
    return found, asker


# -- the data --------------------------------------------------------------------------------------------------


def test_turns_become_dated_facts_in_order(conversation: locomo.Conversation) -> None:
    assert [fact.place for fact in conversation.facts] == list(range(9))
    assert [fact.session for fact in conversation.facts] == [1] * 3 + [2] * 3 + [3] * 3
    assert conversation.facts[0].line == "- [2024-05-01] Alice: I adopted a cat called Miso.\n"
    assert [question.category for question in conversation.questions] == [4, 4, 1, 2], "no adversarial ones"


def test_a_sample_is_the_same_for_a_seed_and_grows(conversation: locomo.Conversation) -> None:
    assert conversation.sample(2, 7) == conversation.sample(3, 7)[:2]
    assert len({tuple(q.name for q in conversation.sample(None, seed)) for seed in range(20)}) > 1


def test_extracted_facts_stand_in_for_turns(data: Path, tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"conv-1": [{"text": "Alice has a cat.", "date": "2024-05-01"}]}))
    [found] = locomo.load(data, ["1"], facts)
    assert [fact.line for fact in found.facts] == ["- [2024-05-01] Alice has a cat.\n"]


def test_a_conversation_may_be_cut_off(conversation: locomo.Conversation) -> None:
    cut = conversation.beginning(3)
    assert cut.facts == conversation.facts[:3]
    assert [question.text for question in cut.questions] == [QA[0][0], QA[1][0]]
    assert [question.evidence for question in conversation.questions] == [(0,), (2,), (-1, 3), (0, 6)]
    assert len(conversation.beginning(7).questions) == 3, "evidence that is nowhere is in no part"


def test_what_is_no_data_is_said(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no conversations"):
        locomo.load(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="has no conv-99"):
        locomo.load(data, ["99"])
    (data / "conv-2.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="not a conversation of LoCoMo's"):
        locomo.load(data)


# -- the measures ----------------------------------------------------------------------------------------------


def test_measures_of_an_answer() -> None:
    assert token_f1("The cat, Miso!", "miso") == pytest.approx(2 / 3)
    assert token_f1("Porto", "Lisbon") == token_f1("", "Lisbon") == 0.0
    assert exact_match("the radiator.", "Radiator") == 1.0
    assert exact_match("the radiators", "radiator") == 0.0


def test_measures_of_distributions() -> None:
    one = torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [1 / 3, 1 / 3, 1 / 3]]).log()
    assert nll(one, [0, 1]) == pytest.approx((math.log(2) + math.log(3)) / 2)
    assert divergence(one, one) == pytest.approx(0.0)
    assert divergence(one, other) == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)


def test_recovered_is_the_share_of_the_gain() -> None:
    none, text = [4.0, 5.0, 6.0], [2.0, 3.0, 4.0]
    assert recovered(none, text, text)[0] == pytest.approx(1.0)
    assert recovered(none, text, none)[0] == pytest.approx(0.0)
    share, (low, high) = recovered(none, text, [3.0, 3.5, 4.2])
    assert share == pytest.approx((15 - 10.7) / 6)
    assert low <= share <= high
    assert math.isnan(recovered(text, none, text)[0]), "text gained nothing"
    low, high = mean_interval([1.0, 2.0, 3.0, 4.0])
    assert low < 2.5 < high


# -- encodings and orders --------------------------------------------------------------------------------------


@pytest.fixture
def material(conversation: locomo.Conversation) -> Material:
    """Fact 8 is nearest to 0, then 1, ...: similarity falls with the place."""
    similarity = np.tile(-np.arange(9, dtype=np.float32), (9, 1))
    return Material(conversation.facts, similarity)


@pytest.mark.parametrize(
    ("name", "preamble", "context"),
    [
        ("alone", False, []),
        ("preamble", True, []),
        ("window:2", False, [2, 3]),
        ("window:2+", True, [2, 3]),
        ("window:50", False, [0, 1, 2, 3]),
        ("session", True, [3]),
        ("anchored:1", True, [3]),
        ("chain", True, [0, 1, 2, 3]),
        ("near:3", True, [2, 1, 0]),
        ("near:6", True, [6, 5, 3, 2, 1, 0]),
        ("near:6:known", True, [3, 2, 1, 0]),
        ("near:3,2", True, [1, 0, 2, 3]),
        ("near:2:two", True, [2, 1, 0]),
        ("stacked:3", True, [2, 1, 0]),
        ("stacked:3:two", True, [2, 1, 0]),
    ],
)
def test_what_stands_before_the_fifth_fact(
    material: Material, name: str, preamble: bool, context: list[int]
) -> None:
    how = encoding(name)
    assert (how.preamble, how.context(material, 4)) == (preamble, context)


@pytest.mark.parametrize("name", ["near", "window:", "near:8:all", "session2", "", "near:8:two:known"])
def test_an_encoding_that_does_not_exist(name: str) -> None:
    with pytest.raises(ConfigurationError, match="no encoding is called"):
        encoding(name)


def test_orders(conversation: locomo.Conversation) -> None:
    chosen = [4, 1, 7, 3]  # the most relevant first; sessions 2, 1, 3, 2
    assert arranged(chosen, "best-last", conversation.facts) == [3, 7, 1, 4]
    assert arranged(chosen, "chronological", conversation.facts) == [1, 3, 4, 7]
    assert arranged(chosen, "sessions", conversation.facts) == [7, 1, 3, 4]


def test_pinned_facts_stand_before_every_other(material: Material) -> None:
    how = pinned(encoding("stacked:3"), [1, 5])
    assert how.context(material, 4) == [1, 2, 0], "5 was not there yet"
    assert how.context(material, 8) == [1, 5, 2, 0]
    assert how.context(material, 5) == [1]
    assert how.base == how.name != encoding("stacked:3").name
    for name in ("near:3", "session", "stacked:3:two"):
        with pytest.raises(ConfigurationError, match=r"before stacked:N"):
            pinned(encoding(name), [1])
        with pytest.raises(ConfigurationError, match=r"before stacked:N"):
            grid(encodings=[name], orders=["best-last"], ms=[0], ks=[1], pinned=[2])


def test_the_facts_that_are_oftenest_near(material: Material) -> None:
    assert material.central(3, 3) == [0, 1, 2]
    assert material.central(5, 3) == [0, 1, 2, 3, 4]


def test_the_grid_has_what_every_setting_is_held_against() -> None:
    settings = grid(
        encodings=["near:8"], orders=["best-last", "chronological"], ms=[0, 2], ks=[5], budgets=[100]
    )
    assert settings[0] == NONE
    assert len(set(settings)) == len(settings) == len({setting.name for setting in settings})
    for setting in settings:
        if setting.path == "injected":
            assert settings.index(setting.as_text) < settings.index(setting)
            assert setting.as_text.plainest in settings
    assert Setting("text", "", "chronological", 2, 5) in settings, (
        "the control: text with its best moved last"
    )
    assert Setting("text", "", "best-last", 2, 5) not in settings, "there they are last already"
    apart = grid(encodings=["near:8"], orders=["best-last"], text_orders=["chronological"], ms=[0, 2], ks=[5])
    assert {setting.path for setting in apart if setting.order == "chronological"} == {"text"}
    assert Setting("text", "", "chronological", 2, 5) not in apart
    for bad in (
        {"orders": ["best"]},
        {"encodings": ["x"]},
        {"ks": [0]},
        {"ms": [-1]},
        {"key_scales": [0.0]},
        {"pinned": [-1]},
    ):
        options: dict[str, Any] = {"encodings": [], "orders": ["best-last"], "ms": [0], "ks": [1], **bad}
        with pytest.raises(ConfigurationError):
            grid(**options)


# -- asking ----------------------------------------------------------------------------------------------------


def test_a_chain_is_exact_and_facts_alone_are_not(
    engine: TransformersEngine, conversation: locomo.Conversation
) -> None:
    settings = grid(encodings=["alone"], orders=["chronological"], ms=[0], ks=[9], budgets=[10_000])
    found, _ = asked(engine, conversation, settings)
    chain = found["injected chain chronological all 10000"]
    alone = found["injected alone chronological k=9"]
    assert all(record["injected_tokens"] > 0 for record in chain + alone)
    assert all(record["prompt_tokens"] == chain[0]["prompt_tokens"] for record in chain[:1] + alone[:1])
    assert max(record["kl"] for record in chain) < 1e-6
    assert max(record["kl"] for record in alone) > 1e-3
    assert [record["nll"] for record in chain] == pytest.approx(
        [record["nll"] for record in found["text chronological all 10000"]], abs=1e-4
    )


def test_pinned_facts_are_a_chain_in_front_of_what_is_recalled(
    engine: TransformersEngine, conversation: locomo.Conversation
) -> None:
    settings = grid(encodings=["stacked:2"], orders=["best-last"], ms=[0, 2], ks=[3], pinned=[0, 2, 9])
    found, asker = asked(engine, conversation, settings)
    few = found["injected stacked:2 best-last k=3 pinned 2"]
    assert all(record["kl"] > 1e-6 for record in few), "what is recalled was encoded in other company"
    moved = found["injected stacked:2 best-last k=3 m=2 pinned 2"]
    assert all(a["injected_tokens"] > b["injected_tokens"] for a, b in zip(few, moved, strict=True))
    chain = found["injected stacked:2 best-last k=3 pinned 9"]
    tokens = len(asker._template.encode_preamble) + sum(len(ids) for ids in asker._ids)
    assert {record["injected_tokens"] for record in chain} == {tokens}, "all stand, none of them twice"
    assert max(record["kl"] for record in chain) < 1e-6
    assert found["injected stacked:2 best-last k=3 m=2 pinned 9"][0]["injected_tokens"] == tokens
    assert max(record["kl"] for record in found["injected stacked:2 best-last k=3"]) > 1e-4
    for row in rows(settings, [record for records in found.values() for record in records]):
        if row["pinned"]:
            assert row["against"] == f"text best-last k=3 pinned {row['pinned']}"


def test_a_budget_keeps_the_latest(engine: TransformersEngine, conversation: locomo.Conversation) -> None:
    settings = grid(encodings=[], orders=["chronological"], ms=[0], ks=[1], budgets=[60, 10_000])
    found, asker = asked(engine, conversation, settings)
    some, everything = (found[f"injected chain chronological all {budget}"] for budget in (60, 10_000))
    assert 0 < some[0]["injected_tokens"] < everything[0]["injected_tokens"]
    assert max(record["kl"] for record in some) < 1e-6
    assert asker.blobs.costs["chain"].tokens < 3 * everything[0]["injected_tokens"], (
        "one pass for a whole chain"
    )


def test_as_many_facts_as_fit_a_budget_of_tokens(
    engine: TransformersEngine, conversation: locomo.Conversation
) -> None:
    settings = grid(
        encodings=["preamble"], orders=["best-last", "chronological"], ms=[0, 1], ks=[], tokens=[70, 10_000]
    )
    found, asker = asked(engine, conversation, settings)
    sizes = [len(ids) for ids in asker._ids]
    preamble = len(asker._template.encode_preamble)
    for record in found["injected preamble best-last 70 tokens"]:
        assert 0 < record["injected_tokens"] - preamble <= 70
        assert record["injected_tokens"] - preamble > 70 - 2 * max(sizes), "as many as fit"
    everything = found["injected preamble chronological 10000 tokens"]
    assert {record["injected_tokens"] for record in everything} == {preamble + sum(sizes)}
    assert all(record["kl_best_last"] >= 0 for record in found["text chronological 70 tokens"])
    moved = found["injected preamble best-last 10000 tokens m=1"]
    assert all(record["injected_tokens"] < preamble + sum(sizes) for record in moved)


def test_facts_may_stand_without_their_dates(data: Path) -> None:
    [found] = locomo.load(data, dated=False)
    assert found.facts[0].line == "- Alice: I adopted a cat called Miso.\n"


def test_what_stands_as_text_is_not_injected(
    engine: TransformersEngine, conversation: locomo.Conversation
) -> None:
    settings = grid(encodings=["preamble"], orders=["best-last"], ms=[0, 2, 5], ks=[5])
    found, asker = asked(engine, conversation, settings)
    names = [f"injected preamble best-last k=5{m}" for m in ("", " m=2", " m=5")]
    tokens = [found[name][0]["injected_tokens"] for name in names]
    assert tokens == sorted(tokens, reverse=True)
    assert len(set(tokens)) == 3
    assert {record["prompt_tokens"] for name in names for record in found[name][:1]} == {
        found["text best-last k=5"][0]["prompt_tokens"]
    }
    cost = asker.blobs.costs["preamble"]
    assert cost.own_tokens < cost.tokens
    assert cost.facts <= 9, "a fact is encoded once, however often it is asked for"


def test_blobs_that_stand_on_all_before_them_are_a_chain(
    engine: TransformersEngine, conversation: locomo.Conversation
) -> None:
    """With as many neighbours as there are facts, the most similar last, but the chain's order: the same tokens."""
    by_place = np.tile(np.arange(9, dtype=np.float32), (9, 1))
    template = PromptTemplate(engine.tokenizer)
    ids = [template.fact_ids(fact.line) for fact in conversation.facts]
    blobs = Blobs(engine, "ada", Material(conversation.facts, by_place), ids, template.encode_preamble)
    stacked = blobs.keys(encoding("stacked:9"), [8, 5])
    chain = blobs.keys(encoding("chain"), list(range(9)))
    before = Segment(template.encode_preamble, blobs.preamble)
    prompts = [
        Prompt("ada", (before, *(Segment(ids[place], keys[place]) for place in (5, 8)), Segment((9, 8, 7))))
        for keys in (stacked, chain)
    ]
    assert set(stacked.values()).isdisjoint(chain.values()), "what they stand on is in their keys"
    ours, theirs = (score(engine, prompt, [50, 60]) for prompt in prompts)
    assert ours.injected_tokens == theirs.injected_tokens == len(prompts[0].ids) - 3
    assert torch.allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    cost = blobs.costs["stacked:9"]
    assert (cost.facts, cost.tokens) == (9, cost.own_tokens), "each was read once, and nothing else"
    assert blobs.keys(encoding("stacked:9"), [8, 5]) == stacked
    assert blobs.costs["stacked:9"] == cost


def test_two_levels_stand_on_blobs_that_stand_on_nothing(
    engine: TransformersEngine, conversation: locomo.Conversation
) -> None:
    settings = grid(encodings=["stacked:2:two"], orders=["best-last"], ms=[0], ks=[9])
    _, asker = asked(engine, conversation, settings)
    assert asker.blobs.costs["preamble"].tokens > asker.blobs.costs["preamble"].own_tokens
    cost = asker.blobs.costs["stacked:2:two"]
    assert (
        cost.own_tokens
        <= cost.tokens
        < cost.own_tokens + 3 * len(PromptTemplate(engine.tokenizer).encode_preamble)
    ), "only what has no neighbours is computed behind a preamble"


def test_a_session_is_encoded_in_one_pass(
    engine: TransformersEngine, conversation: locomo.Conversation
) -> None:
    settings = grid(encodings=["session", "window:3+"], orders=["chronological"], ms=[0], ks=[9])
    found, asker = asked(engine, conversation, settings)
    session, window = asker.blobs.costs["session"], asker.blobs.costs["window:3+"]
    preamble = len(PromptTemplate(engine.tokenizer).encode_preamble)
    assert session.tokens == session.own_tokens + 3 * preamble
    assert window.tokens > session.tokens
    first = found["injected session chronological k=9"][0]
    assert first["injected_tokens"] > 0


def test_an_answer_of_its_own_is_the_engines(
    engine: TransformersEngine, conversation: locomo.Conversation
) -> None:
    prompt = Prompt("ada", (Segment(tuple(range(10, 40))),))
    found = score(engine, prompt, [50, 60], own_tokens=6)
    alone = engine.generate(prompt, SamplingOptions(max_tokens=6, stop=("\n",)))
    assert found.said == alone.text
    assert score(engine, prompt, [50, 60]).said is None
    assert torch.equal(found.logprobs, score(engine, prompt, [50, 60]).logprobs)


def test_a_gold_answer_begins_as_the_template_lets_it(
    engine: TransformersEngine, conversation: locomo.Conversation
) -> None:
    asker = Asker(engine, HashingEmbedder(None), conversation, generate=False)
    question = conversation.questions[0]
    assert engine.tokenizer.decode(asker._answer(question)) in ("Miso", " Miso")
    opened = engine.tokenizer.decode(asker._template.plain(asker._messages(question)))
    assert engine.tokenizer.decode(asker._answer(question)).startswith(" ") is not opened[-1].isspace()


def test_scaled_keys_change_both_paths_alike(
    engine: TransformersEngine, conversation: locomo.Conversation
) -> None:
    """A chain is exact under any scale: both paths scale the same keys."""
    prompt_settings = [Setting("text", "", "chronological", 0, 0, 10_000, scale) for scale in (1.0, 1.3)]
    chain = [Setting("injected", "chain", "chronological", 0, 0, 10_000, scale) for scale in (1.0, 1.3)]
    found, _ = asked(engine, conversation, [*prompt_settings, *chain])
    nlls = [[record["nll"] for record in found[setting.name]] for setting in (*prompt_settings, *chain)]
    assert nlls[0] == pytest.approx(nlls[2], abs=1e-4)
    assert nlls[1] == pytest.approx(nlls[3], abs=1e-4)
    assert nlls[0] != pytest.approx(nlls[1], abs=1e-3)


def test_what_is_known_is_not_asked_again(
    engine: TransformersEngine, conversation: locomo.Conversation
) -> None:
    settings = grid(encodings=["preamble"], orders=["best-last"], ms=[0], ks=[3])
    asker = Asker(engine, HashingEmbedder(None), conversation, generate=False)
    question = conversation.questions[0]
    whole = {record["setting"]: record for record in asker.ask(question, settings, set())}
    assert set(whole) == {setting.name for setting in settings}
    left = list(asker.ask(question, settings, {NONE.name, "text best-last k=3"}))
    assert [record["setting"] for record in left] == ["injected preamble best-last k=3"]
    assert left[0]["kl"] == pytest.approx(whole[left[0]["setting"]]["kl"], abs=1e-6), (
        "its reference is made again"
    )
    assert list(asker.ask(question, settings, set(whole))) == []


def test_a_run_that_goes_on_still_compares_the_orders_of_text(
    engine: TransformersEngine, conversation: locomo.Conversation
) -> None:
    settings = grid(encodings=[], orders=["best-last", "chronological"], ms=[0], ks=[4])
    asker = Asker(engine, HashingEmbedder(None), conversation, generate=False)
    question = conversation.questions[0]
    whole = {record["setting"]: record for record in asker.ask(question, settings, set())}
    name = "text chronological k=4"
    [again] = asker.ask(question, settings, set(whole) - {name})
    assert again["kl_best_last"] == pytest.approx(whole[name]["kl_best_last"], abs=1e-6)
    assert again["kl_best_last"] > 0


def test_an_engine_that_cannot_score_is_asked_token_by_token(engine: TransformersEngine) -> None:
    class Plain:
        """The engine without `score`."""

        generate = staticmethod(engine.generate)

    prompt = Prompt("ada", (Segment(tuple(range(10, 40))),))
    direct = score(engine, prompt, [50, 60, 70])
    stepped = score(Plain(), prompt, [50, 60, 70])  # type: ignore[arg-type]
    assert stepped.logprobs.shape == direct.logprobs.shape
    assert torch.allclose(stepped.logprobs, direct.logprobs, atol=1e-4)
    with pytest.raises(ConfigurationError, match="use --engine transformers"):
        score(Plain(), prompt, [50], key_scale=1.1)  # type: ignore[arg-type]


# -- the command -----------------------------------------------------------------------------------------------


def test_the_command_resumes_reports_and_draws(
    data: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("benchmarks.machine.embedder", lambda: HashingEmbedder(None))
    out, report = tmp_path / "out", tmp_path / "rows.json"
    arguments = [
        "--data",
        str(data),
        "--out",
        str(out),
        "--model",
        str(model),
        "--k",
        "3",
        "--blob-bytes",
        str(1 << 26),
    ]
    arguments += ["--json", str(report), "--encodings", "preamble", "--generate"]
    assert command.main([*arguments, "--questions", "2"]) == 0
    first = (out / "records.jsonl").read_text().splitlines()
    with (out / "records.jsonl").open("a") as file:
        file.write('{"setting": "text bes')  # killed while it wrote
    (out / "records.jsonl").write_text("\n".join([*first, '{"setting": "text bes']) + "\n")
    assert command.main([*arguments, "--plots", str(tmp_path / "plots")]) == 0
    assert (out / "records.jsonl").read_text().splitlines()[: len(first)] == first
    found = json.loads(report.read_text())
    assert {row["questions"] for row in found["rows"]} == {4}
    fields = {
        "path",
        "encoding",
        "order",
        "m",
        "k",
        "nll",
        "recovered",
        "recovered_ci",
        "kl",
        "f1",
        "ttft_ms",
        "questions",
    }
    assert all(fields <= set(row) for row in found["rows"] if row["path"] != "none")
    assert len(found["categories"]["single-hop"][0]) > 5
    assert found["categories"]["single-hop"][0]["questions"] == 2
    assert found["costs"]["preamble"]["computed_per_own"] > 1
    assert "4 questions" in capsys.readouterr().out
    assert (tmp_path / "plots" / "quality.png").read_bytes()[:4] == b"\x89PNG"
    page = (tmp_path / "plots" / "quality.html").read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert command.main([*arguments, "--report"]) == 0
    with pytest.raises(ConfigurationError, match="pass another --out"):
        command.main([*arguments, "--dtype", "bfloat16"])


class Bench(BaseHTTPRequestHandler):
    """Speaks chat completions and judges by letters: a stand-in for a model, which no test here can run."""

    asked: ClassVar[list[dict[str, Any]]] = []
    says = "RIGHT"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
        told = body["messages"][-1]["content"]
        text = self.says if "Miso" in told else "Hm. It says nothing of that: WRONG"
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def bench() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bench)
    Bench.asked, Bench.says = [], "RIGHT"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_answers_are_judged_once(
    bench: str, data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.machine.embedder", lambda: HashingEmbedder(None))
    monkeypatch.setenv("INFERSCALE_JUDGE_KEY", "secret")
    report = tmp_path / "rows.json"
    arguments = ["--data", str(data), "--out", str(tmp_path / "out"), "--model", str(model), "--k", "3"]
    arguments += ["--blob-bytes", str(1 << 26), "--encodings", "preamble", "--orders", "best-last"]
    assert command.main([*arguments, "--generate"]) == 0
    judged = [*arguments, "--generate", "--report", "--judge", bench, "--json", str(report)]
    with pytest.raises(ConfigurationError, match="pass --judge-model"):
        command.main(judged)
    assert command.main([*judged, "--judge-model", "judge"]) == 0
    asked = list(Bench.asked)
    said = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    answers = [record for record in said if (record.get("said") or "").strip()]
    assert 0 < len(asked) == len(answers)
    assert {(one["path"], one["key"], one["model"]) for one in asked} == {
        ("/v1/chat/completions", "Bearer secret", "judge")
    }
    about_cat = [record for record in answers if record["question"] == "conv-1 0"]
    right = {record["setting"] for record in about_cat}
    for row in json.loads(report.read_text())["rows"]:
        assert row["judge"] == (0.25 if row["name"] in right else 0.0), "one question in four names the cat"
    assert command.main([*judged, "--judge-model", "judge"]) == 0
    assert Bench.asked == asked, "nothing is judged twice"


def test_a_judge_that_gives_no_verdict(bench: str) -> None:
    with Judge(bench, "judge") as judge:
        assert judge.verdict("What is the cat called?", "Miso", "miso") == 1.0
        assert judge.verdict("Where?", "Porto", "Lisbon") == 0.0
        assert judge.verdict("Where?", "Porto", "  ") == 0.0
        assert len(Bench.asked) == 2, "silence is wrong, whoever judges"
        Bench.says = "I would rather not say"
        with pytest.raises(EngineError, match="neither RIGHT nor WRONG"):
            judge.verdict("What is the cat called?", "Miso", "miso")
    with Judge("http://127.0.0.1:9", "judge") as judge, pytest.raises(EngineError, match="gave no answer"):
        judge.verdict("Where?", "Porto", "Lisbon")


def test_a_setting_that_was_never_asked_has_no_row() -> None:
    settings = grid(encodings=["alone"], orders=["best-last", "chronological"], ms=[0], ks=[2])
    record = {"question": "1", "category": 4, "nll": 1.0, "kl": 0.0, "ttft_ms": 1.0}
    record |= {"injected_tokens": 1, "prompt_tokens": 2}
    records = [{"setting": name, **record} for name in ("none", "text best-last k=2")]
    assert [row["name"] for row in rows(settings, records)] == ["none", "text best-last k=2"]


def test_rows_are_about_the_same_questions() -> None:
    settings = grid(encodings=["alone"], orders=["best-last"], ms=[0], ks=[2])
    names = [setting.name for setting in settings]
    value = {"none": 4.0, "text best-last k=2": 2.0, "injected alone best-last k=2": 3.0}
    records = [
        {
            "setting": name,
            "question": str(number),
            "category": 4,
            "nll": value[name],
            "kl": 0.1,
            "ttft_ms": 1.0,
        }
        | {"injected_tokens": 1, "prompt_tokens": 2}
        for name in names
        for number in range(3 if name != "none" else 2)
    ]
    found = {row["name"]: row for row in rows(settings, records)}
    assert {row["questions"] for row in found.values()} == {2}
    assert found["injected alone best-last k=2"]["recovered"] == pytest.approx(0.5)
    assert rows(settings, records, category=1) == []
