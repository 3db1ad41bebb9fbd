"""One turn of a conversation as a memory sees it: asked once, written once.

LlamaIndex's engines and agents read and write a memory in orders of their own, and an agent reads it again before every
step. A turn begins with what the user says, or with what an engine asks about, and ends with the answer. It must
never outlive its answer: what is recalled for the next question is recalled anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.llms.types import ChatMessage, MessageRole, ToolCallBlock

from llama_index.llms.inferscale.recollection import Recollection


class Turn:
    """What is known of the turn so far."""

    def __init__(self) -> None:
        self._asked: str | None = None
        self._recalled: Recollection | None = None
        self._over = False
        self._said: list[ChatMessage] = []

    def recalled(self, question: str, *, fresh: bool) -> Recollection | None:
        """What this turn recalled for `question`. `fresh`: an engine names the question, which, after an answer, begins
        the next turn."""
        if self._over and fresh:
            return None
        return self._recalled if question == self._asked else None

    def recall(self, question: str, found: Recollection) -> None:
        self._asked, self._recalled, self._over = question, found, False

    def hear(self, message: ChatMessage) -> list[ChatMessage]:
        """What is to be remembered now: the user's words and the answer, when `message` is the answer."""
        if message.role is MessageRole.USER and message.content:
            if self._over:
                self._asked, self._recalled, self._over = None, None, False
            self._said.append(message)
            return []
        if not is_answer(message):
            return []
        said, self._said, self._over = self._said, [], True
        return [*said, message] if said else []

    @property
    def untaken(self) -> bool:
        """Whether memories were recalled, the turn is over, and no LLM has taken them for injection."""
        found = self._recalled
        return self._over and found is not None and bool(found.results) and not found.taken

    @classmethod
    def behind(cls, history: Sequence[ChatMessage]) -> Turn:
        """The turn that goes on from a history: what stands behind its last answer is still to be answered."""
        turn = cls()
        for message in history:
            turn.hear(message)
        turn._over = False
        return turn


def is_answer(message: ChatMessage) -> bool:
    """Whether a message ends a turn: the assistant's words, and no call of a tool."""
    calls = message.additional_kwargs.get("tool_calls") or any(
        isinstance(block, ToolCallBlock) for block in message.blocks
    )
    assistant = message.role in (MessageRole.ASSISTANT, MessageRole.CHATBOT, MessageRole.MODEL)
    return assistant and not calls and bool(message.content)
