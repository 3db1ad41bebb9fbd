"""The words of a streamed answer, and of the same answer whole."""

from __future__ import annotations

import pytest

from inferscale_memory.prompt.tools import read_tools
from inferscale_memory.recall.answer import _Words
from inferscale_memory.recall.tool_calling import Calling

CALL = '<tool_call>{"name": "now"}</tool_call>'


@pytest.mark.parametrize("text", [f" \n Hi {CALL} there.", f"Hi {CALL}", " Hi", f"\n{CALL} Done.", ""])
def test_a_stream_says_what_the_answer_says(text: str) -> None:
    """Words around a call are trimmed in the answer, and may have been let out before."""
    calling = Calling(tuple(read_tools([{"name": "now"}])))
    words = _Words(calling)
    said = calling.said(text).text
    streamed = "".join(words.push(letter) for letter in text) + words.rest(said)
    assert streamed.strip() == said.strip()
