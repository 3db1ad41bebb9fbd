"""Users at once, each with memories of their own: a closed loop, in which everybody waits for an answer and then asks
the next question.

Retrieval and composition count: a time runs from the question to the first token. Who has no blobs must not pay for
any: along other paths than the injected one what is written meanwhile is encoded after the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import cycle, islice
from time import perf_counter

from benchmarks.place import Place
from inferscale_memory.commands.demo.conversations import Session, Turn, User
from inferscale_memory.commands.demo.remembering import messages
from inferscale_memory.engine.base import Completion, SamplingOptions
from inferscale_memory.prompt import Prompt, PromptTemplate, Segment

_SESSION = 24
_DAY = datetime(2024, 5, 1, 12)


@dataclass(frozen=True, slots=True)
class Member:
    """One user. Attributes: said: their own facts, in order; no two users begin with the same."""

    user_id: str
    said: tuple[Turn, ...]

    def question(self, number: int) -> str:
        """Another one for every number below that of the facts, about one of them."""
        turn = self.said[number % len(self.said)]
        start = " ".join(turn.text.split()[:8])
        again = "" if number < len(self.said) else f" ({number})"
        return f'What came of it after {turn.speaker} said "{start} ..."?{again}'

    def sessions(self) -> list[Session]:
        return [
            Session(_DAY, self.said[start : start + _SESSION]) for start in range(0, len(self.said), _SESSION)
        ]


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer. Attributes: ttft_s: seconds from the question to the first token."""

    user_id: str
    question: str
    ttft_s: float
    completion: Completion


@dataclass(frozen=True, slots=True)
class Loop:
    """A closed loop. Attributes: written: facts that were added meanwhile."""

    answers: tuple[Asked, ...]
    seconds: float
    written: int


def members(users: Sequence[User], count: int, facts: int) -> list[Member]:
    """`count` users with `facts` turns each, taken from the conversations, each beginning at another turn."""
    turns = [turn for user in users for session in user.sessions for turn in session.turns]
    found = []
    for number in range(count):
        start = (7 * number + number // len(turns)) % len(turns)
        said = tuple(islice(cycle(turns[start:] + turns[:start]), facts))
        found.append(Member(f"user-{number}", said))
    return found


class Crowd:
    """Members of one place, who ask along one path at a time.

    Args:
        k: how many memories a question recalls.
        questions: of each user in a loop.
        writes: facts added a second while a loop runs, all users together.
    """

    def __init__(
        self,
        place: Place,
        everybody: Sequence[Member],
        *,
        k: int,
        questions: int,
        max_tokens: int,
        writes: float,
    ) -> None:
        self._place = place
        self._everybody = everybody
        self._template = PromptTemplate(place.engine.tokenizer)
        self._options = SamplingOptions(max_tokens=max_tokens, ignore_eos=True)
        self._k = k
        self._questions = questions
        self._writes = writes
        self._serial = 0
        self._added = 0

    async def loop(self, path: str, users: int, number: int) -> Loop:
        """The first `users` members ask their questions of loop `number`: the same along every path, and others in
        every loop."""
        asking = self._everybody[:users]
        self._serial += 1
        # The text path keeps one salt, as a user's requests do; a hit is of the same question, asked before.
        salt = "text" if path == "text" else f"loop {self._serial}"
        if path == "hit":
            await asyncio.gather(*(self._user(path, member, number, salt) for member in asking))
        ended = asyncio.Event()
        with nullcontext() if path == "injected" else self._place.engine.held():
            writing = asyncio.create_task(self._write(asking, path, ended))
            began = perf_counter()
            answers = await asyncio.gather(*(self._user(path, member, number, salt) for member in asking))
            seconds = perf_counter() - began
            ended.set()
            written = await writing
        if written:
            await self.flushed()
        return Loop(tuple(answer for mine in answers for answer in mine), seconds, written)

    # -- asking ----------------------------------------------------------------------------------------------

    async def _user(self, path: str, member: Member, number: int, salt: str) -> list[Asked]:
        first = number * self._questions
        return [
            await self._ask(
                path, member.user_id, member.question(place), f"{salt} {place}" if path == "hit" else salt
            )
            for place in range(first, first + self._questions)
        ]

    async def _ask(self, path: str, user_id: str, question: str, salt: str) -> Asked:
        began = perf_counter()
        prompt = await self._prompt(path, user_id, question)
        first: float | None = None
        completion: Completion | None = None
        async for chunk in self._place.engine.astream(prompt.salted(salt), self._options):
            first = perf_counter() - began if first is None else first
            completion = chunk.completion
        assert first is not None, "a stream has at least one piece"
        assert completion is not None, "a stream ends with its completion"
        return Asked(user_id, question, first, completion)

    async def _prompt(self, path: str, user_id: str, question: str) -> Prompt:
        if path == "none":
            ids = self._template.plain([{"role": "user", "content": question}])
            return Prompt(user_id, (Segment(ids),))
        prepare = self._place.memory.aprepare if self._place.random else self._place.memory.prepare
        prepared = await prepare(question, user_id=user_id, top_k=self._k, max_tokens=self._options.max_tokens)
        prompt: Prompt = prepared.prompt
        return prompt if path == "injected" else prompt.as_text()

    # -- writing ---------------------------------------------------------------------------------------------

    async def remember(self, member: Member, sessions: Sequence[Session]) -> None:
        """Write sessions as memories; encoding follows."""
        for session in sessions:
            if self._place.random:
                await asyncio.to_thread(self._place.memory.write, member.user_id, session)
            else:
                await self._place.memory.add(
                    messages(session), user_id=member.user_id, infer=False, timestamp=session.date
                )

    async def flushed(self) -> None:
        """Wait until everything is encoded."""
        if self._place.random:
            await asyncio.to_thread(self._place.memory.flush)
        else:
            await self._place.memory.flush()

    async def _write(self, asking: Sequence[Member], path: str, ended: asyncio.Event) -> int:
        """Add a fact now and then, in turn for everybody, until the loop has ended; returns how many."""
        written, began = 0, perf_counter()
        while self._writes:
            pause = began + (written + 1) / self._writes - perf_counter()
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), max(0.0, pause))
            if ended.is_set():
                break
            self._added += 1
            member = asking[self._added % len(asking)]
            turn = Turn("User", f"Note {self._added}: {member.said[self._added % len(member.said)].text}")
            await self.remember(member, [Session(_DAY, (turn,))])
            if self._place.random and path == "injected":  # it has no encoder of its own
                await self.flushed()
            written += 1
        return written
