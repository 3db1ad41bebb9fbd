"""One person's talk with a memory: what is said is remembered, and every answer can say why it was given.

It must never remember what somebody only asked, nor show one user another's memories.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mem0.exceptions import MemoryError as Mem0Error
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.errors import ExtractionError, InferScaleError
from inferscale_memory.memory import Memory, Reply

_HELP = """\
Say something: it is answered, and remembered unless it is a question.
  /memories [WORDS]  everything that is remembered, or what WORDS would recall, with scores
  /why               what the last answer stood on: memories, their scores, tokens, time to the first token
  /forget NUMBER     forget a memory of the last list, everywhere
  /forget all        forget everything about this user
  /user NAME         be somebody else
  /new               begin a new conversation
  /quit              end (so does Ctrl-D)"""


class Talk:
    """The conversation of one user at a time."""

    def __init__(
        self, memory: Memory, console: Console, *, user: str, extract: bool, max_tokens: int
    ) -> None:
        self._memory = memory
        self._console = console
        self._extract = extract
        self._options = SamplingOptions(max_tokens=max_tokens)
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._console.print(_HELP),
            "memories": self._memories,
            "why": self._why,
            "forget": self._forget,
            "user": self._become,
            "new": lambda _: self._begin(),
        }
        self._user = user
        self._last: Reply | None = None
        self._listed: list[dict[str, Any]] = []
        self._session = memory.session(user_id=user)

    def greet(self) -> None:
        """Say whose memory this is."""
        count = len(self._everything())
        what = "1 memory" if count == 1 else f"{count} memories"
        self._console.print(f"[dim]{escape(self._user)}, {what}. /help lists the commands.[/dim]")

    def hear(self, line: str) -> bool:
        """Answer a line. False when it ends the talk."""
        line = line.strip()
        if line == "/quit":
            return False
        try:
            if line.startswith("/"):
                name, _, rest = line[1:].partition(" ")
                command = self._commands.get(name)
                if command is None:
                    self._note(f"There is no /{name}: /help lists the commands.")
                else:
                    command(rest.strip())
            elif line:
                self._answer(line)
        except KeyboardInterrupt:
            self._note("\nInterrupted.")
        except (InferScaleError, ValueError, Mem0Error) as error:  # mem0 has errors of its own for a bad name
            self._note(str(error))
        return True

    # -- saying something ------------------------------------------------------------------------------------

    def _answer(self, line: str) -> None:
        try:
            for piece in self._session.stream(line, options=self._options):
                self._console.print(piece.text, end="", markup=False, soft_wrap=True)
                self._last = piece.reply or self._last
        except InferScaleError as error:  # a question that cannot be asked, or an engine that fails
            self._note(str(error))
            return
        self._console.print()
        if self._extract or not line.endswith("?"):
            self._remember(line)

    def _remember(self, line: str) -> None:
        said = [{"role": "user", "content": line}]
        try:
            added = self._memory.add(said, user_id=self._user, infer=self._extract)["results"]
        except ExtractionError as error:
            self._note(f"Nothing could be drawn out of that, for now: {error}")
            return
        for fact in added:
            self._note(f"Remembered: {fact['memory']}")

    # -- commands --------------------------------------------------------------------------------------------

    def _memories(self, words: str) -> None:
        if words:
            found = self._memory.search(words, filters={"user_id": self._user}, top_k=20, threshold=0.0)[
                "results"
            ]
        else:
            found = self._everything()
        self._listed = found
        if not found:
            self._note("Nothing is remembered.")
            return
        table = self._table("", "memory", "since", *(["score"] if words else []))
        for number, fact in enumerate(found, 1):
            score = [f"{fact['score']:.2f}"] if words else []
            table.add_row(str(number), escape(fact["memory"]), str(fact.get("created_at") or "")[:10], *score)
        self._console.print(table)

    def _why(self, _: str) -> None:
        reply = self._last
        if reply is None:
            self._note("Nothing was answered yet.")
            return
        if reply.memories:
            table = self._table("memory", "score", "in the prompt as")
            for memory in reply.memories:
                how = "injected" if memory.injected else "text"
                table.add_row(escape(memory.text), f"{memory.score:.2f}", how)
            self._console.print(table)
        else:
            self._console.print("No memory was recalled.")
        done, times = reply.completion, reply.timings
        self._console.print(
            f"{done.prompt_tokens} tokens: {done.injected_tokens} injected, {done.cached_tokens} in the prefix cache, "
            f"{done.prefilled_tokens} prefilled. First token after {1e3 * times.ttft_s:.0f} ms, of which "
            f"{1e3 * times.search_s:.0f} searching and {1e3 * times.compose_s:.0f} composing."
        )
        if done.refused:
            self._note(f"Not all was injected: {done.refused}")
        if reply.dropped:
            self._note(f"{len(reply.dropped)} memories did not fit.")

    def _forget(self, which: str) -> None:
        if which == "all":
            self._memory.delete_all(user_id=self._user)
            self._begin()
            self._note("Everything about this user is forgotten, and a new conversation begun.")
            return
        if not which.isdecimal() or not 1 <= int(which) <= len(self._listed):
            self._note("Name a number of the last list: /memories makes one.")
            return
        fact = self._listed.pop(int(which) - 1)
        try:
            self._memory.delete(fact["id"])
        except ValueError:
            self._note("That one is gone already.")
            return
        self._begin()  # the conversation may have said it
        found = self._memory.audit(fact["memory"])
        where = (
            "nowhere left"
            if found.clean
            else f"still in {len(found.found)} places: other memories say it too"
        )
        self._note(f"Forgotten, and {where}. A new conversation has begun.")

    def _become(self, name: str) -> None:
        if not name:
            self._note("Name somebody: /user NAME")
            return
        before, self._user = self._user, name
        try:
            self._begin()
            self.greet()
        except Exception:  # no user can have that name: the talk goes on with the one before
            self._user = before
            self._begin()
            raise

    # -- inside ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._session = self._memory.session(user_id=self._user)
        self._last, self._listed = None, []

    def _everything(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._memory.get_all(filters={"user_id": self._user}, top_k=10_000)[
            "results"
        ]
        return found

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    @staticmethod
    def _table(*columns: str) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in columns:
            table.add_column(name, overflow="fold")
        return table
