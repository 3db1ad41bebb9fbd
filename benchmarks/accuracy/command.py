"""The program behind `inferscale bench accuracy`.

Every answer to every question is written down as soon as it is there, so that an interrupted run goes on where it was:
run the same command again. More encodings, orders or questions are added to what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.accuracy import locomo
from benchmarks.accuracy.judge import Judge, unjudged
from benchmarks.accuracy.settings import ORDERS, Setting, grid
from benchmarks.accuracy.summary import rows
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.progress import bar


def main(argv: Sequence[str] = ()) -> int:
    """Ask LoCoMo's questions along every path, and say how close injected memories come to text."""
    options = _parser().parse_args(argv)
    settings = grid(
        encodings=options.encodings,
        orders=options.orders,
        ms=options.m,
        ks=options.k,
        budgets=options.whole,
        key_scales=options.key_scale,
        tokens=options.tokens,
        text_orders=options.text_orders,
        pinned=options.pinned,
    )
    conversations = locomo.load(options.data, options.conversations, options.facts, dated=not options.undated)
    if options.first is not None:
        if options.facts or options.first < 1:
            raise ConfigurationError("--first counts turns, at least 1: leave out --facts")
        conversations = [conversation.beginning(options.first) for conversation in conversations]
    log = Log(options.out, _about(options))
    if not options.report:
        _run(options, conversations, settings, log)
    if options.judge:
        _judge(options, conversations, settings, log)
    among = {conversation.name for conversation in conversations}
    records = [record for record in log.records if record["conversation"] in among]
    found = rows(settings, records, seed=options.seed)
    if not found:
        raise ConfigurationError("no question is answered along every path yet: run without --report")
    by_category = {
        name: rows(settings, records, category=category, seed=options.seed)
        for category, name in locomo.CATEGORIES.items()
    }
    _show(found)
    if options.json:
        report = {"rows": found, "categories": by_category, "costs": log.costs(), "about": _about(options)}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plots:
        from benchmarks.plots import quality_against_ttft

        quality_against_ttft(found, options.plots)
    return 0


class Log:
    """Records in a file, one JSON object a line; the first line says what they are about."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Raises ConfigurationError when the folder holds records of another model, or of other options that change
        what a record says."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "records.jsonl"
        self.records: list[dict[str, Any]] = []
        self.verdicts: dict[tuple[str, str], float] = {}
        self._costs: dict[str, list[float]] = {}
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        if not lines:
            self._write({"about": dict(about)})
            return
        if json.loads(lines[0])["about"] != dict(about):
            raise ConfigurationError(f"{folder} holds records of another model or seed: pass another --out")
        for line in lines[1:]:
            try:
                self._take(json.loads(line))
            except ValueError:  # the last line of a run that was killed while it wrote
                continue

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record, what encoding has cost, or a verdict on a record."""
        self._write(record)
        self._take(record)

    def known(self, question: str) -> set[str]:
        """Names of the settings along which `question` was asked."""
        return {record["setting"] for record in self.records if record["question"] == question}

    def costs(self) -> dict[str, dict[str, float]]:
        """By encoding: facts, their own tokens, tokens computed, seconds, and the ratio of the second and third."""
        return {
            name: {
                "facts": facts,
                "own_tokens": own,
                "computed_tokens": computed,
                "seconds": seconds,
                "computed_per_own": computed / own if own else 0.0,
            }
            for name, (facts, own, computed, seconds) in self._costs.items()
        }

    def _take(self, record: dict[str, Any]) -> None:
        if "verdict" in record:
            name = (record["verdict"], record["question"])
            self.verdicts[name] = record["right"]
            for judged in self.records:
                if (judged["setting"], judged["question"]) == name:
                    judged["judge"] = record["right"]
        elif "cost" in record:
            before = self._costs.get(record["cost"], [0.0] * 4)
            self._costs[record["cost"]] = [a + b for a, b in zip(before, record["spent"], strict=True)]
        else:
            self.records.append(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _run(
    options: argparse.Namespace,
    conversations: Sequence[locomo.Conversation],
    settings: Sequence[Setting],
    log: Log,
) -> None:
    from benchmarks.accuracy.asking import Asker
    from benchmarks.machine import embedder, engine

    todo = [
        (conversation, question)
        for conversation in conversations
        for question in conversation.sample(options.questions, options.seed)
    ]
    with (
        bar("Asking", len(todo) * len(settings)) as advance,
        engine(options.engine, options.model, dtype=options.dtype, blob_bytes=options.blob_bytes) as running,
    ):
        embeds = embedder()
        asker: Asker | None = None
        current = ""
        for conversation, question in todo:
            if asker is None or current != conversation.name:
                asker, current = (
                    Asker(running, embeds, conversation, generate=options.generate),
                    conversation.name,
                )
            known = log.known(question.name)
            advance(len(known & {setting.name for setting in settings}))
            for record in asker.ask(question, settings, known):
                log.add(record)
                advance(1)
            for name, cost in asker.blobs.costs.items():
                log.add({"cost": name, "spent": [cost.facts, cost.own_tokens, cost.tokens, cost.seconds]})
            asker.blobs.costs.clear()


def _judge(
    options: argparse.Namespace,
    conversations: Sequence[locomo.Conversation],
    settings: Sequence[Setting],
    log: Log,
) -> None:
    """Verdicts on all answers that have none."""
    if not options.judge_model:
        raise ConfigurationError("a judge needs a model: pass --judge-model")
    asked = {question.name: question for conversation in conversations for question in conversation.questions}
    wanted = {setting.name for setting in settings}
    todo = [
        record
        for record in unjudged(log.records, log.verdicts)
        if record["question"] in asked and record["setting"] in wanted
    ]
    key = os.environ.get("INFERSCALE_JUDGE_KEY", "")
    with bar("Judging", len(todo)) as advance, Judge(options.judge, options.judge_model, key) as judge:
        for record in todo:
            question = asked[record["question"]]
            right = judge.verdict(question.text, question.answer, record["said"])
            log.add({"verdict": record["setting"], "question": record["question"], "right": right})
            advance(1)


def _about(options: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for two records to be comparable."""
    first = "" if options.first is None else f", the first {options.first}"
    return {
        "model": str(options.model or "demo"),
        "engine": options.engine,
        "dtype": options.dtype,
        "facts": f"{options.facts or 'turns'}{' undated' if options.undated else ''}{first}",
        "generate": options.generate,
    }


def _show(found: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=f"{found[0]['questions']} questions", title_justify="left", box=None)
    for name in ("setting", "NLL", "recovered", "95%", "KL to text", "F1", "judge", "TTFT ms", "injected"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for row in found:
        low, high = row.get("recovered_ci", (None, None))
        table.add_row(
            row["name"],
            f"{row['nll']:.3f}",
            _percent(row.get("recovered")),
            "" if low is None else f"{_percent(low)}-{_percent(high)}",
            _number(row["kl"]),
            _number(row["f1"]),
            _percent(row["judge"]),
            f"{row['ttft_ms']:.0f}",
            f"{row['injected_tokens']:.0f}",
        )
    Console().print(table)


def _percent(value: float | None) -> str:
    return "" if value is None or value != value else f"{100 * value:.0f}%"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("inferscale bench accuracy", description=main.__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of LoCoMo's conv-*.json")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for records; a run goes on from what is there"
    )
    parser.add_argument(
        "--conversations", nargs="+", default=[], metavar="N", help="such as 26 30 (default: all)"
    )
    parser.add_argument("--facts", type=Path, help="JSON of extracted facts instead of raw turns")
    parser.add_argument("--model", type=Path, help="folder of a model (default: the demo model)")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--blob-bytes", type=int, default=6 << 30, help="room for blobs (default: 6 GiB)")
    parser.add_argument("--questions", type=int, help="of each conversation (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--encodings",
        nargs="*",
        default=["session", "stacked:8"],
        metavar="NAME",
        help="none: text paths only",
    )
    parser.add_argument(
        "--orders", nargs="+", default=["best-last", "chronological"], metavar="|".join(ORDERS)
    )
    parser.add_argument("--text-orders", nargs="+", default=[], metavar="ORDER", help="orders for text only")
    parser.add_argument(
        "--m", type=int, nargs="+", default=[0], help="how many of the best stand as text, last"
    )
    parser.add_argument("--undated", action="store_true", help="facts' lines without their dates")
    parser.add_argument(
        "--top-k", "--k", dest="k", type=int, nargs="*", default=[20], help="how many facts are recalled"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[], help="as many facts as fit so many tokens, instead of k"
    )
    parser.add_argument(
        "--whole", type=int, nargs="+", default=[], metavar="TOKENS", help="budgets of whole memories"
    )
    parser.add_argument(
        "--first",
        type=int,
        metavar="TURNS",
        help="only these turns, and the questions whose evidence is in them",
    )
    parser.add_argument(
        "--pinned",
        type=int,
        nargs="+",
        default=[0],
        metavar="FACTS",
        help="that stand in front of every question's: those oftenest among the nearest of others",
    )
    parser.add_argument("--key-scale", type=float, nargs="+", default=[1.0])
    parser.add_argument(
        "--generate", action="store_true", help="answers too, for F1 and exact match (slower)"
    )
    parser.add_argument(
        "--judge", metavar="URL", help="base of an OpenAI-compatible API that judges the answers"
    )
    parser.add_argument("--judge-model", metavar="NAME", help="its model; its key is INFERSCALE_JUDGE_KEY")
    parser.add_argument("--report", action="store_true", help="only report what is there")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--plots", type=Path, help="folder for a PNG and an HTML page")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
