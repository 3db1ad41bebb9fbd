"""A real vLLM engine in this process, with its scheduler and worker at hand: what the connector's tests drive.

In process, so that a test can poison the paged cache, look into the arena and break things. That the engine core also
works in a process of its own is tested in tests/engine/test_vllm.py.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["INFERSCALE_SECRET"] = "the secret of the tests"

from inferscale_memory.connector import protocol, secret
from inferscale_memory.connector.protocol import Encode, Forget, Inject, Probe
from inferscale_memory.prompt.segments import PUBLIC_OWNER, Prompt, Segment

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What a test looks at."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    injected: int
    known: int
    reply: dict[str, Any]

    def differs(self, other: Answer) -> float:
        """Largest difference of log-probabilities, over the generated tokens up to the first that differs.

        A token that only one side has among its likeliest counts with the other side's least likely: at least that.
        """
        worst = 0.0
        for step, (mine, theirs) in enumerate(zip(self.logprobs, other.logprobs, strict=True)):
            for left, right in ((mine, theirs), (theirs, mine)):
                floor = min(right.values())
                worst = max(
                    [
                        worst,
                        *(abs(value - right.get(token, min(floor, value))) for token, value in left.items()),
                    ]
                )
            if self.tokens[step] != other.tokens[step]:
                break
        return worst


class Rig:
    """One engine. `Rig.open` makes it; only one may be open in a process."""

    model: Path

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._secret = secret.from_environment()
        self._serial = 0
        told = self.ask(Probe("anyone"), (*[10] * 16, *range(10, 26)), tokens=2)
        self.fingerprint, self.unsupported = told["fingerprint"], told["unsupported"]

    @classmethod
    @contextmanager
    def open(
        cls, model: Path, *, dtype: str = "float32", extra: dict[str, Any] | None = None, **options: Any
    ) -> Iterator[Rig]:
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import has_kv_transfer_group

        assert not has_kv_transfer_group(), "another engine is open in this process: close it first"
        settings: dict[str, Any] = {
            "enforce_eager": True,
            "block_size": 32,
            "num_gpu_blocks_override": 256,
            "max_model_len": 2048,
            "max_num_batched_tokens": 256,
            "seed": 0,
        }
        transfer = {
            "kv_connector": "InferScaleConnector",
            "kv_connector_module_path": "inferscale_memory.connector.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"device_bytes": 64 << 20, "host_bytes": 64 << 20, **(extra or {})},
        }
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        llm = LLM(str(model), dtype=dtype, kv_transfer_config=transfer, **(settings | options))
        try:
            yield cls(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()
            os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)

    # -- inside the engine --------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def decider(self) -> Any:
        """The connector's scheduler side."""
        return self.scheduler.connector._scheduler

    @property
    def worker(self) -> Any:
        """The connector's worker side."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    @property
    def vocabulary(self) -> int:
        return self.llm.llm_engine.model_config.get_vocab_size()

    def poison(self) -> None:
        """Fill every page with garbage and forget every cached block: only what is written from now on is right."""
        assert self.scheduler.reset_prefix_cache(), "a request is still running"
        for layer in self.worker._layers:
            layer.kv_cache.normal_(std=3.0)

    def cached_blocks(self) -> int:
        """Blocks that a request could hit."""
        return sum(
            block.block_hash is not None for block in self.scheduler.kv_cache_manager.block_pool.blocks
        )

    # -- asking -------------------------------------------------------------------------------------------------

    def sampling(self, tokens: int, ask: protocol.Ask | None = None, **options: Any) -> Any:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": protocol.params(ask, self._secret)} if ask is not None else None
        return SamplingParams(
            max_tokens=tokens,
            min_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            logprobs=20,
            extra_args=extra,
            **options,
        )

    def run(self, prompts: Sequence[tuple[Ids, str]], sampling: Sequence[Any]) -> list[Answer]:
        """Run (ids, cache salt) together; answers in order."""
        inputs = [{"prompt_token_ids": list(ids), "cache_salt": salt} for ids, salt in prompts]
        outputs = self.llm.generate(inputs, list(sampling), use_tqdm=False)
        return [self.answer(output) for output in outputs]

    @staticmethod
    def answer(output: Any) -> Answer:
        made = output.outputs[0]
        reply = (output.kv_transfer_params or {}).get(protocol.NAME, {})
        return Answer(
            tokens=tuple(made.token_ids),
            logprobs=tuple({t: p.logprob for t, p in step.items()} for step in made.logprobs or ()),
            injected=reply.get("injected", 0),
            known=output.num_cached_tokens or 0,
            reply=reply,
        )

    def ask(
        self, ask: protocol.Ask, ids: Ids = (7,), *, tokens: int = 1, salt: str | None = None
    ) -> dict[str, Any]:
        return self.run([(ids, salt or self.fresh())], [self.sampling(tokens, ask)])[0].reply

    def fresh(self) -> str:
        """A salt that was never used."""
        self._serial += 1
        return f"fresh{self._serial}"

    def encode(
        self,
        owner: str,
        ids: Ids,
        spans: Sequence[tuple[int, int]],
        mentions: Sequence[tuple[str, int]] = (),
        base: Sequence[tuple[str, int]] = (),
    ) -> list[str]:
        """Encode and return the keys, one per span. `base`: (key, tokens) of the blobs that it stands on."""
        reply = self.encoded(Encode(owner, tuple(spans), tuple(mentions), tuple(base), self.fresh()), ids)
        assert reply["error"] is None, reply["error"]
        return [key for key, _ in reply["blobs"]]

    def encoded(self, ask: Encode, ids: Ids) -> dict[str, Any]:
        """The reply to an encode."""
        salt = protocol.encode_salt(self._secret, self.fingerprint, ask.owner, ask.segments, nonce=ask.nonce)
        return self.ask(ask, ids, tokens=2, salt=salt)

    def encode_many(
        self, requests: Sequence[tuple[str, Ids, Sequence[tuple[int, int]], Any]]
    ) -> list[list[str]]:
        prompts = [
            (ids, protocol.encode_salt(self._secret, self.fingerprint, owner))
            for owner, ids, _, _ in requests
        ]
        asks = [Encode(owner, tuple(spans), tuple(mentions)) for owner, _, spans, mentions in requests]
        answers = self.run(prompts, [self.sampling(2, ask) for ask in asks])
        for answer in answers:
            assert answer.reply["error"] is None, answer.reply["error"]
        return [[key for key, _ in answer.reply["blobs"]] for answer in answers]

    def injection(self, prompt: Prompt, tokens: int = 4) -> tuple[tuple[Ids, str], Any]:
        """(ids and salt, sampling) of a prompt to be injected."""
        composition = tuple((segment.key, len(segment.ids)) for segment in prompt.composition)
        mentions, position = [], 0
        for segment in prompt.segments:
            if segment.tag is not None:
                mentions.append((segment.tag, position))
            position += len(segment.ids)
        nonce = prompt.salt or self.fresh()
        ask = Inject(prompt.owner, composition, nonce, tuple(mentions))
        salt = protocol.compose_salt(self._secret, self.fingerprint, prompt.owner, composition, nonce=nonce)
        return (tuple(prompt.ids), salt), self.sampling(tokens, ask)

    def inject(self, prompt: Prompt, tokens: int = 4) -> Answer:
        request, sampling = self.injection(prompt, tokens)
        return self.run([request], [sampling])[0]

    def plain(self, ids: Sequence[int], tokens: int = 4) -> Answer:
        """The same ids as text, under a salt of their own."""
        return self.run([(tuple(ids), self.fresh())], [self.sampling(tokens)])[0]

    def at_hand(self, owner: str, keys: Sequence[str]) -> set[str]:
        return set(self.ask(Probe(owner, tuple(keys)))["at_hand"])

    def forget(self, owner: str, keys: Sequence[str] = (), tags: Sequence[str] = ()) -> int:
        return self.ask(Forget(owner, tuple(keys), tuple(tags)))["dropped"]

    # -- things to say ------------------------------------------------------------------------------------------

    def words(self, count: int, seed: int) -> Ids:
        """`count` token ids, the same for the same seed."""
        draw = random.Random(seed)
        return tuple(draw.randrange(8, self.vocabulary) for _ in range(count))

    def remember(
        self, owner: str, facts: Sequence[Ids], preamble: Ids, *, tags: Sequence[str] = ()
    ) -> tuple[Segment, ...]:
        """Preamble and facts as segments with blobs, each encoded after everything before it: exact."""
        head = self.encode(PUBLIC_OWNER, preamble, [(0, len(preamble))])[0]
        segments = [Segment(preamble, head)]
        if not facts:
            return tuple(segments)
        ids, spans = preamble, []
        for fact in facts:
            spans.append((len(ids), len(ids) + len(fact)))
            ids += fact
        names = list(tags) or [None] * len(facts)
        mentions = [(tag, start) for tag, (start, _) in zip(names, spans, strict=True) if tag]
        keys = self.encode(owner, ids, spans, mentions)
        segments += [Segment(f, k, t) for f, k, t in zip(facts, keys, names, strict=True)]
        return tuple(segments)
