"""`inferscale bench extraction`: what one `add` costs when the engine extracts, on a real vLLM.

Each add is one prompt: fixed instructions, then what mem0 puts beside the message. The same prompt is then answered as
text under a fresh salt, which shares nothing with anybody: what every add would cost without a blob and without a
prefix cache. The two take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

SAID = (
    "I moved from Lisbon to Porto in March and work as a nurse at the children's hospital now.",
    "My cat is called Miso. She is grey and sleeps on the radiator.",
    "I am allergic to peanuts, and I prefer tea over coffee.",
    "On Friday I meet my sister Clara at the restaurant near the river.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for every add of two users, in turn; `--json FILE` writes them too."""
    parser = argparse.ArgumentParser("inferscale bench extraction", description=main.__doc__)
    parser.add_argument("--model", type=Path, help="a model folder (default: SmolLM2-135M-Instruct, fetched)")
    parser.add_argument("--adds", type=int, default=2, help="of each user, at most 4 (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=300, help="of an answer (default: %(default)s)")
    parser.add_argument(
        "--context",
        type=int,
        help="stretch the model's context to so many tokens. From about 18,000 on mem0's own instructions are used; "
        "the time they take is real, what a model beyond its context extracts is not",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)

    from inferscale_memory.engine.base import DEFAULT_OPTIONS, Completion, SamplingOptions
    from inferscale_memory.engine.vllm import VLLMEngine
    from inferscale_memory.errors import ExtractionError
    from inferscale_memory.fetch import demo_model
    from inferscale_memory.memory import Memory
    from inferscale_memory.prompt import Prompt

    class Watched(VLLMEngine):
        asked: list[tuple[Prompt, SamplingOptions, Completion, float]]

        def generate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
            began = perf_counter()
            completion = super().generate(prompt, options)
            self.asked.append((prompt, options, completion, perf_counter() - began))
            return completion

    stretched = {}
    if options.context:
        stretched = {
            "hf_overrides": {"max_position_embeddings": options.context},
            "max_model_len": options.context,
        }
    columns = (
        "user",
        "add",
        "prompt",
        "injected",
        "cached",
        "prefilled",
        "first token",
        "as text",
        "answer",
        "facts",
    )
    table, rows = Table(*columns), list[dict[str, Any]]()
    engine = Watched(options.model or demo_model(), dtype="float32", enforce_eager=True, **stretched)
    with (
        tempfile.TemporaryDirectory() as folder,
        engine,
        Memory(
            engine=engine,
            folder=folder,
            config={
                "llm": {
                    "provider": "inferscale",
                    "config": {"max_tokens": options.max_tokens, "min_parameters": 0},
                }
            },
        ) as memory,
    ):
        engine.asked = []
        engine.start()
        for number in range(options.adds):
            for user in ("ada", "ben"):
                began = perf_counter()
                try:
                    facts: int | None = len(memory.add(SAID[number % len(SAID)], user_id=user)["results"])
                except ExtractionError:  # it was cut off
                    facts = None
                total = perf_counter() - began
                memory.flush()
                prompt, _, answer, took = engine.asked[-1]
                alone = prompt.as_text().salted(f"alone {user} {number}")
                text = engine.generate(alone, SamplingOptions(max_tokens=1))
                counts = {
                    "prompt": answer.prompt_tokens,
                    "injected": answer.injected_tokens,
                    "cached": answer.cached_tokens,
                    "prefilled": answer.prefilled_tokens,
                }
                seconds = {
                    "add_s": total,
                    "ttft_s": answer.ttft_s,
                    "text_ttft_s": text.ttft_s,
                    "answer_s": took - answer.ttft_s,
                }
                said = len(answer.token_ids)
                rows.append({"user": user, **counts, **seconds, "answer_tokens": said, "facts": facts})
                table.add_row(
                    user,
                    f"{total:.2f} s",
                    *(f"{tokens:,}" for tokens in counts.values()),
                    f"{answer.ttft_s:.2f} s",
                    f"{text.ttft_s:.2f} s",
                    f"{said} in {took - answer.ttft_s:.1f} s",
                    "cut off" if facts is None else str(facts),
                )
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
