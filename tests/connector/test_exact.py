"""Injected memories give the answer of the prefilled prompt, on real vLLM, for every supported family.

Every test poisons the paged cache first, asserts how many tokens were really injected, and compares with the plain
prompt under a salt of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from inferscale_memory.connector.protocol import Encode
from inferscale_memory.connector.scheduler import admission
from inferscale_memory.engine.base import EncodeRequest, SamplingOptions, Span
from inferscale_memory.engine.transformers import TransformersEngine
from inferscale_memory.fetch import demo_model
from inferscale_memory.prompt.segments import PUBLIC_OWNER, Prompt, Segment
from tests.connector.rig import Rig
from tests.models import FAMILIES, tiny_model

pytestmark = pytest.mark.engine

BOUND = {"float32": 1e-4, "bfloat16": 0.15, "smollm2-bfloat16": 0.3}
"""Log-probabilities. In bf16 the same prompt, cut into other chunks, differs by as much: see `test_noise`. SmolLM2 with
its 30 layers differs by 0.21 on a CPU with AMX, whose kernels sum in another order for another number of rows."""
MOVED = {"float32": 1e-3, "bfloat16": 0.5}
"""Two implementations of the whole model, so wider: in bf16 they differ as much on a plain prompt."""
CASES = [(family, dtype) for dtype in ("float32", "bfloat16") for family in (*FAMILIES, "smollm2")]


@pytest.fixture(scope="session")
def oracles() -> Iterator[dict[str, TransformersEngine]]:
    """Transformers engines by model folder: another implementation of everything, to agree with."""
    engines: dict[str, TransformersEngine] = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Rig, str]]:
    """One engine per (family, dtype) for all tests of this module: two may not be open in one process."""
    family, dtype = request.param
    model = demo_model() if family == "smollm2" else tiny_model(family, tmp_path_factory.mktemp(family))
    with Rig.open(model, dtype=dtype) as rig:
        rig.model = model
        yield rig, dtype


@pytest.fixture(autouse=True)
def one_encode_may_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty facts are encoded at once here, which are more than a quarter of the rig's device tier."""
    monkeypatch.setattr(admission, "ENCODE_SHARE", 1)


def bound(rig: Rig, dtype: str) -> float:
    name = f"smollm2-{dtype}" if rig.model == demo_model() else dtype
    return BOUND.get(name, BOUND[dtype])


def facts(rig: Rig, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Facts of 5 to 23 tokens: no length is a multiple of anything."""
    return [rig.words(5 + (7 * i) % 19, seed * 1000 + i) for i in range(count)]


def assert_plain_answer(rig: Rig, dtype: str, prompt: Prompt) -> None:
    """Injected into poisoned pages, all but its last segment, `prompt` gets the answer of its plain ids."""
    rig.poison()
    injected = rig.inject(prompt)
    plain = rig.plain(prompt.ids)

    assert injected.injected == sum(len(s.ids) for s in prompt.segments[:-1])
    assert injected.differs(plain) <= bound(rig, dtype)
    if dtype == "float32":
        assert injected.tokens == plain.tokens


@pytest.mark.parametrize("count", [0, 1, 50])
def test_facts_encoded_after_all_before_them_give_the_plain_prompts_answer(
    case: tuple[Rig, str], count: int
) -> None:
    rig, dtype = case
    segments = rig.remember("alice", facts(rig, count), rig.words(17, 1))
    prompt = Prompt("alice", (*segments, Segment(rig.words(13, 2))))

    assert_plain_answer(rig, dtype, prompt)


def test_a_moved_fact_is_what_transformers_makes_of_it(
    case: tuple[Rig, str], oracles: dict[str, TransformersEngine]
) -> None:
    """Encoded behind contexts of many lengths p, injected at many places q; the other engine computes the same keys
    with its own rotary code and puts them at q in a cache of its own."""
    rig, dtype = case
    name = f"{rig.model}-{dtype}"
    oracle = oracles.setdefault(name, TransformersEngine(rig.model, dtype=dtype))
    fact, suffix = rig.words(31, 41), rig.words(12, 42)
    for p in (0, 1, 63, 130):
        context = rig.words(p, 43)
        key = rig.encode("alice", (*context, *fact), [(p, p + 31)])[0]
        (theirs,) = oracle.encode([EncodeRequest("alice", (*context, *fact), (Span(p, p + 31),))])
        for q in (1, 40, 64, 211):
            preamble = rig.words(q, 44)
            head = rig.encode(PUBLIC_OWNER, preamble, [(0, q)])[0]
            (their_head,) = oracle.encode([EncodeRequest(PUBLIC_OWNER, preamble, (Span(0, q),))])
            rig.poison()
            mine = rig.inject(
                Prompt("alice", (Segment(preamble, head), Segment(fact, key), Segment(suffix))), tokens=1
            )
            segments = (
                Segment(preamble, their_head.refs[0].key),
                Segment(fact, theirs.refs[0].key),
                Segment(suffix),
            )
            other = oracle.generate(Prompt("alice", segments), SamplingOptions(max_tokens=1, logprobs=20))
            assert mine.injected == other.injected_tokens == q + 31
            assert other.logprobs is not None
            common = mine.logprobs[0].keys() & other.logprobs[0].keys()
            assert len(common) >= 10
            worst = max(abs(mine.logprobs[0][t] - other.logprobs[0][t]) for t in common)
            assert worst <= MOVED[dtype], f"p={p} q={q}"


def test_a_fact_that_stands_on_exact_blobs_is_exact(case: tuple[Rig, str]) -> None:
    """Each fact is encoded behind the blobs of all before it, injected into poisoned pages: only its own tokens are
    computed, and the whole gives the plain prompt's answer."""
    rig, dtype = case
    segments = rig.remember("alice", (), rig.words(17, 51))
    for number, fact in enumerate(facts(rig, 9, seed=5)):
        before = tuple(token for segment in segments for token in segment.ids)
        base = [(segment.key, len(segment.ids)) for segment in segments]
        rig.poison()
        span = (len(before), len(before) + len(fact))
        reply = rig.encoded(Encode("alice", (span,), (), tuple(base), rig.fresh()), (*before, *fact))
        assert (reply["error"], reply["injected"]) == (None, len(before)), f"fact {number}"
        segments = (*segments, Segment(fact, reply["blobs"][0][0]))
    prompt = Prompt("alice", (*segments, Segment(rig.words(13, 52))))

    assert_plain_answer(rig, dtype, prompt)


def test_a_fact_that_stands_on_moved_blobs_is_what_transformers_makes_of_it(
    case: tuple[Rig, str], oracles: dict[str, TransformersEngine]
) -> None:
    """The neighbours were encoded alone and stand where they never stood; the other engine does the same."""
    rig, dtype = case
    oracle = oracles.setdefault(f"{rig.model}-{dtype}", TransformersEngine(rig.model, dtype=dtype))
    preamble, suffix, *lines = rig.words(9, 61), rig.words(12, 62), *facts(rig, 6, seed=6)

    def encode_both(ids, start, base, their_base):
        key = rig.encode("alice", ids, [(start, len(ids))], base=base)[0]
        span = (Span(start, len(ids)),)
        (theirs,) = oracle.encode([EncodeRequest("alice", ids, span, base=tuple(their_base))])
        assert theirs.error is None
        return (key, len(ids) - start), theirs.refs[0]

    head = encode_both(preamble, 0, (), ())
    alone = [encode_both((*preamble, *line), 9, (), ()) for line in lines[:5]]
    order = [head, *(alone[i] for i in (3, 0, 4))]
    before = (*preamble, *lines[3], *lines[0], *lines[4])
    stacked = encode_both(
        (*before, *lines[5]), len(before), [mine for mine, _ in order], [theirs for _, theirs in order]
    )

    shown = [(preamble, head), (lines[1], alone[1]), (lines[5], stacked)]
    rig.poison()
    segments = [Segment(ids, mine[0]) for ids, (mine, _) in shown]
    mine = rig.inject(Prompt("alice", (*segments, Segment(suffix))), tokens=1)
    segments = [Segment(ids, theirs.key) for ids, (_, theirs) in shown]
    other = oracle.generate(
        Prompt("alice", (*segments, Segment(suffix))), SamplingOptions(max_tokens=1, logprobs=20)
    )

    assert mine.injected == other.injected_tokens == len(mine_ids(segments))
    assert other.logprobs is not None
    common = mine.logprobs[0].keys() & other.logprobs[0].keys()
    assert len(common) >= 10
    assert max(abs(mine.logprobs[0][t] - other.logprobs[0][t]) for t in common) <= MOVED[dtype]


def mine_ids(segments: list[Segment]) -> list[int]:
    return [token for segment in segments for token in segment.ids]


def test_what_is_injected_is_what_is_read(case: tuple[Rig, str]) -> None:
    """The control: another fact's blob under the same length changes the answer. Else the tests prove nothing."""
    rig, dtype = case
    fact, other = rig.words(40, 11), rig.words(40, 12)
    preamble, suffix = rig.words(9, 1), rig.words(6, 2)
    right = Prompt("alice", (*rig.remember("alice", [fact], preamble), Segment(suffix)))
    wrong = Prompt("alice", (*rig.remember("alice", [other], preamble), Segment(suffix)))

    assert rig.inject(right).injected == rig.inject(wrong).injected == 49
    assert rig.inject(right).differs(rig.inject(wrong)) > 3 * bound(rig, dtype)


def test_order_and_repetition_are_the_prompts(case: tuple[Rig, str]) -> None:
    """Facts stand where the prompt puts them: a permuted and a repeated composition are injected whole."""
    rig, dtype = case
    preamble, suffix = rig.words(9, 1), rig.words(11, 2)
    head, *alone = rig.remember("alice", facts(rig, 6, seed=3), preamble)
    orders = ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [2, 2, 0, 2])
    answers = []
    for order in orders:
        prompt = Prompt("alice", (head, *(alone[i] for i in order), Segment(suffix)))
        rig.poison()
        answers.append(rig.inject(prompt))
        assert answers[-1].injected == len(prompt.ids) - len(suffix)
    assert answers[0].differs(answers[1]) > bound(rig, dtype)
    assert answers[0].differs(answers[2]) > bound(rig, dtype)


def test_captured_keys_rotated_to_their_own_place_are_the_prefilled_ones(case: tuple[Rig, str]) -> None:
    """Bit for bit, in every layer: what attention was given in a plain prefill is what composing would write."""
    rig, _ = case
    ids = rig.words(70, 21)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def watch(number: int):
        def hook(layer, args):
            if args[1].shape[0] == len(ids):
                seen[number] = (args[1].clone(), args[2].clone())

        return hook

    layers = rig.worker._layers
    handles = [layer.register_forward_pre_hook(watch(n)) for n, layer in enumerate(layers)]
    try:
        key = rig.encode(PUBLIC_OWNER, ids, [(0, len(ids))])[0]
    finally:
        for handle in handles:
            handle.remove()

    blob = rig.worker.arenas[0].read(rig.decider.store.get(key).rows[0])
    keys = blob[:, 0].contiguous()
    rotated = rig.worker.composer.rotate(keys, torch.arange(len(ids)))
    assert len(seen) == len(layers)
    for number, (key_seen, value_seen) in seen.items():
        assert torch.equal(rotated[number].reshape(len(ids), -1), key_seen.reshape(len(ids), -1))
        assert torch.equal(blob[number, 1].reshape(len(ids), -1), value_seen.reshape(len(ids), -1))


def test_noise(case: tuple[Rig, str]) -> None:
    """How much the plain prompt differs from itself when it is prefilled in other pieces: what BOUND is made of."""
    rig, dtype = case
    ids = rig.words(600, 31)
    whole = rig.plain(ids)
    salt = rig.fresh()
    rig.run([(ids[:333], salt)], [rig.sampling(1)])
    pieces = rig.run([(ids, salt)], [rig.sampling(4)])[0]
    assert pieces.known == 320
    assert whole.differs(pieces) <= bound(rig, dtype)
