"""Keeps what requests carry out of vLLM's logs: prompts hold memories, and parameters owners, tokens and tags.

vLLM prints a request's parameters with `--enable-log-requests` and in the dump of a crash, and prompts, bodies and
answers at DEBUG. What says that a request came, how long it was and how it ended is still logged.
"""

from __future__ import annotations

import logging
from typing import Any

SPEAKING = {
    "vllm.entrypoints.serve.utils.request_logger": 1,
    "vllm.entrypoints.serve.middleware.log_response": 0,
    "vllm.entrypoints.serve.exception_handling.error_response": 1,
    "vllm.entrypoints.serve.exception_handling.handlers.validation": 1,
    "vllm.entrypoints.serve.exception_handling.handlers.vllm_error": 1,
    "vllm.entrypoints.serve.exception_handling.handlers.exception": 1,
    "vllm.entrypoints.anthropic.serving": 0,
    "vllm.renderers.chat_utils": 0,
}
"""Loggers that are given what requests carry, and how many arguments of their records are harmless: a request's id, or
the class of an error."""
SEPARATOR = ", extra_args="


def redact() -> None:
    """Install this in the process. May be called again."""
    from vllm.sampling_params import SamplingParams

    for name, harmless in SPEAKING.items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, Hide) for each in logger.filters):
            logger.addFilter(Hide(harmless))
    before = SamplingParams.__repr__
    if getattr(before, "hides", False):
        return

    def hidden(self: Any) -> str:
        known, separator, _ = before(self).partition(SEPARATOR)
        return f"{known}{separator}<hidden>)" if separator else f"{type(self).__name__}(<hidden>)"

    hidden.hides = True  # type: ignore[attr-defined]
    SamplingParams.__repr__ = hidden


class Hide(logging.Filter):
    """Replaces the arguments of a record behind the first `harmless` ones, and the words of an exception."""

    def __init__(self, harmless: int) -> None:
        super().__init__()
        self._harmless = harmless

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            kept = record.args[: self._harmless]
            record.args = (*kept, *(_hidden(argument) for argument in record.args[self._harmless :]))
        elif record.args:
            record.args = {name: _hidden(value) for name, value in record.args.items()}
        if record.exc_info:
            kind = record.exc_info[0]
            record.exc_info = record.exc_text = None
            record.msg = f"{record.msg} ({kind.__name__ if kind else 'error'})"
        return True


def _hidden(argument: object) -> object:
    match argument:
        case None | bool() | int() | float():
            return argument
        case str():
            return f"<{len(argument)} characters>"
        case list() | tuple():
            return f"<{len(argument)} items>"
        case Exception() | dict() | bytes():
            return f"<{type(argument).__name__}>"
        case _:  # parameters and adapters, whose own words are harmless
            return argument
