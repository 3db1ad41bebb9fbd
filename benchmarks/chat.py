"""`inferscale bench chat`: a conversation with recall on every turn, and what each turn waits for.

    session     `memory.session`: goes on from the prompt so far or is composed anew, whichever leaves less to prefill
    sticky      a session that goes on whenever it can; what is newly recalled follows as text
    recomposed  the same session composed anew on every turn
    text        recalled memories in the system message, as an app with mem0 writes them; the prefix cache is on

The conversations take turns: the same words, answers of the same length, salts of their own. With tools in the template
there is no session, because it takes none; recomposed then is `memory.chat` with the conversation so far.
"""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from benchmarks.place import Place, about, add_arguments, opened
from benchmarks.reporting import medians, ratio, spread, table, write
from inferscale_memory.commands.demo.conversations import User
from inferscale_memory.commands.demo.remembering import remember
from inferscale_memory.engine.base import Completion, SamplingOptions
from inferscale_memory.errors import EngineError
from inferscale_memory.progress import bar
from inferscale_memory.prompt import Prompt, PromptTemplate, Segment

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place on a day.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "day": {"type": "string"}},
                "required": ["place"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "remind",
            "description": "Remind the user of something at a time.",
            "parameters": {
                "type": "object",
                "properties": {"what": {"type": "string"}, "when": {"type": "string"}},
                "required": ["what", "when"],
            },
        },
    },
)
_TOKENS = ("prompt_tokens", "injected_tokens", "cached_tokens", "prefilled_tokens")
_SYSTEM = "You are a helpful AI. Answer the question based on query and memories.\nUser Memories:\n{memories}"


def main(argv: Sequence[str] = ()) -> int:
    """Time to the first token, turn by turn, of a conversation that recalls on every turn."""
    parser = argparse.ArgumentParser("inferscale bench chat", description=main.__doc__)
    add_arguments(parser, random=False, context=8192)
    parser.add_argument("--turns", type=int, default=20, help="of the conversation (default 20)")
    parser.add_argument(
        "--top-k", "--k", dest="k", type=int, default=10, help="memories recalled on each turn (default 10)"
    )
    parser.add_argument("--repeat", type=int, default=3, help="conversations of each kind (default 3)")
    parser.add_argument("--max-tokens", type=int, default=24, help="of an answer (default 24)")
    options = parser.parse_args(argv)
    if min(options.turns, options.k, options.repeat, options.max_tokens) < 1:
        parser.error("--turns, --top-k, --repeat and --max-tokens must be at least 1")
    with opened(options) as place:
        report = {
            "about": about(options, place),
            **run(
                place, turns=options.turns, k=options.k, repeat=options.repeat, max_tokens=options.max_tokens
            ),
        }
    show(report)
    write(options, report)
    if options.plots:
        from benchmarks.plots import ttft_lines

        ttft_lines(
            report["summary"], options.plots, "chat", title="Time to the first token of each turn", x="turn"
        )
    return 0


def run(place: Place, *, turns: int, k: int, repeat: int, max_tokens: int) -> dict[str, Any]:
    """Everything measured at `place`: a row per turn and conversation, medians by turn and over all, ratios.

    Raises:
        EngineError: blobs cannot be used with this model, or nothing was injected where it had to be.
    """
    engine = place.engine
    if engine.unsupported:
        raise EngineError(f"blobs cannot be used with this model: {engine.unsupported}")
    user = place.users[0]
    remember(place.memory, [user])
    said = words(user, turns)
    for talk in _talks(place, user, k, max_tokens, "warm-up"):
        for number, text in enumerate(said[:2]):
            talk.turn(number, text)
    rows: list[dict[str, Any]] = []
    with bar("Talking", repeat * turns * len(_KINDS)) as advance:
        for repetition in range(repeat):
            talks = _talks(place, user, k, max_tokens, f"talk {repetition}")
            for number, text in enumerate(said):
                first = (repetition + number) % len(talks)
                for talk in (*talks[first:], *talks[:first]):
                    rows.append({"repetition": repetition, **talk.turn(number, text)})
                    advance()
    paths = [name for name, _, _ in _KINDS]
    return {
        "rows": rows,
        "summary": [_summary(rows, path, turn) for path in paths for turn in range(1, turns + 1)],
        "overall": [_summary(rows, path, None) for path in paths],
        "ratios": _ratios(rows),
    }


def words(user: User, turns: int) -> list[str]:
    """What is said, turn by turn: the user's questions, then questions about what was once said."""
    asked = [question.text for question in user.questions]
    once = [turn.text for session in user.sessions for turn in session.turns]
    for text in once:
        if len(asked) >= turns:
            break
        asked.append(f'You know that I once said "{" ".join(text.split()[:8])} ...". What else about it?')
    return [asked[number % len(asked)] for number in range(turns)]


# -- the three kinds of conversation -------------------------------------------------------------------------


class _Talk(ABC):
    """One conversation of one kind. Every prompt of it has its salt."""

    def __init__(
        self, name: str, place: Place, user: User, *, k: int, max_tokens: int, salt: str, tools: bool
    ) -> None:
        self._name = name
        self._place = place
        self._user_id = user.user_id
        self._k = k
        self._options = SamplingOptions(max_tokens=max_tokens, ignore_eos=True)
        self._salt = f"{name} {salt}"
        self._tools = TOOLS if tools else None
        self._messages: list[dict[str, Any]] = []

    def turn(self, number: int, text: str) -> dict[str, Any]:
        """Say `text`, and what it took."""
        self._place.engine.salt = self._salt
        try:
            ttft_s, completion = self._say(text)
        finally:
            self._place.engine.salt = ""
        return {
            "turn": number + 1,
            "path": self._name,
            "tools": self._tools is not None,
            "ttft_ms": 1e3 * ttft_s,
            **{name: getattr(completion, name) for name in _TOKENS},
        }

    @abstractmethod
    def _say(self, text: str) -> tuple[float, Completion]:
        """Seconds to the first token, and the answer."""

    def _heard(self, text: str, answer: str) -> None:
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


class _Session(_Talk):
    """A session of the memory: as it is, composed anew on every turn, or whenever it must be."""

    def __init__(self, *args: Any, recompose: bool = False, sticky: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self._recompose = recompose
        self._session = self._place.memory.session(user_id=self._user_id, k=self._k, sticky=sticky)

    def _say(self, text: str) -> tuple[float, Completion]:
        if self._recompose:
            self._session.recompose()
        reply = self._session.chat(text, options=self._options)
        return reply.timings.ttft_s, reply.completion


class _Whole(_Talk):
    """The whole conversation given to `memory.chat` on every turn: recomposed, and with tools if it has any."""

    def _say(self, text: str) -> tuple[float, Completion]:
        messages = [*self._messages, {"role": "user", "content": text}]
        reply = self._place.memory.chat(
            messages,
            user_id=self._user_id,
            k=self._k,
            max_tokens=self._options.max_tokens,
            options=self._options,
            tools=self._tools,
        )
        self._heard(text, reply.completion.text)
        return reply.timings.ttft_s, reply.completion


class _Text(_Talk):
    """What an app with mem0 does: search, and the memories go into the system message."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        from inferscale_memory.memory import Chat

        self._template = PromptTemplate(self._place.engine.tokenizer)
        self._recall = Chat(memory=self._place.memory).recall

    def _say(self, text: str) -> tuple[float, Completion]:
        began = perf_counter()
        # Not `search`, which may cut some off: the memories are those of the other paths.
        found = self._recall(text, {"user_id": self._user_id}, k=self._k)
        memories = "\n".join(f"- {result['memory']}" for result in found)
        messages = [
            {"role": "system", "content": _SYSTEM.format(memories=memories)},
            *self._messages,
            {"role": "user", "content": text},
        ]
        ids = self._template.plain(messages, tools=self._tools)
        before_s = perf_counter() - began
        prompt = Prompt(f"user:{self._user_id}", (Segment(ids),))
        completion = self._place.engine.generate(prompt, self._options)
        self._heard(text, completion.text)
        return before_s + completion.ttft_s, completion


# path -> (kind, how)
_KINDS: tuple[tuple[str, type[_Talk], dict[str, Any]], ...] = (
    ("session", _Session, {"tools": False}),
    ("sticky", _Session, {"tools": False, "sticky": True}),
    ("recomposed", _Session, {"tools": False, "recompose": True}),
    ("text", _Text, {"tools": False}),
    ("recomposed, tools", _Whole, {"tools": True}),
    ("text, tools", _Text, {"tools": True}),
)
_PAIRS = (
    ("text", "session"),
    ("sticky", "session"),
    ("recomposed", "session"),
    ("text, tools", "recomposed, tools"),
)


def _talks(place: Place, user: User, k: int, max_tokens: int, salt: str) -> list[_Talk]:
    return [
        kind(name, place, user, k=k, max_tokens=max_tokens, salt=salt, **how) for name, kind, how in _KINDS
    ]


# -- what comes of it ----------------------------------------------------------------------------------------


def _summary(rows: Sequence[dict[str, Any]], path: str, turn: int | None) -> dict[str, Any]:
    mine = [row for row in rows if row["path"] == path and turn in (None, row["turn"])]
    found: dict[str, Any] = {} if turn is None else {"turn": turn}
    times = spread([row["ttft_ms"] for row in mine])
    return {"path": path, **found, "ttft_ms": times, **medians(mine, _TOKENS)}


def _ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over all turns but the first, on which nothing can be kept yet."""
    later = [row for row in rows if row["turn"] > 1] or rows
    return [
        {
            "ratio": f"{above} / {below}",
            "value": ratio(
                later, above, below, column="ttft_ms", pair=lambda row: (row["repetition"], row["turn"])
            ),
        }
        for above, below in _PAIRS
    ]


def show(report: dict[str, Any]) -> None:
    """Tables on stdout."""
    table(
        "Time to the first token by turn, medians (quartiles)",
        report["summary"],
        ("path", "turn", "ttft_ms", *_TOKENS),
    )
    table("Over all turns", report["overall"], ("path", "ttft_ms", *_TOKENS))
    table("Ratios within each turn, from the second on", report["ratios"], ("ratio", "value"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
