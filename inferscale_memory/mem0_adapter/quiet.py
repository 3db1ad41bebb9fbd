"""What mem0 logs that says nothing to the people who run an app. It is dropped unless its logger is set to DEBUG.

A filter on a logger sees what is logged through that logger alone, so nothing else is touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

_SPACY = "mem0.utils.spacy_models"
_MAIN = "mem0.memory.main"


class _Dropped(logging.Filter):
    def __init__(self, drops: Callable[[str], bool]) -> None:
        super().__init__()
        self._drops = drops

    def filter(self, record: logging.LogRecord) -> bool:
        asked = logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
        return asked or not self._drops(record.getMessage())


def quiet(tries_again: Callable[[], bool]) -> None:
    """Drop two kinds of messages.

    mem0 warns at every start that spaCy is not installed, which is an extra. And it logs an extraction as failed before
    it raises; `tries_again` says that what was raised is caught, and the call made again in parts.
    """
    _drop(_SPACY, lambda message: "spaCy is not installed" in message)
    _drop(_MAIN, lambda message: message.startswith("LLM extraction failed") and tries_again())


def _drop(name: str, drops: Callable[[str], bool]) -> None:
    logger = logging.getLogger(name)
    if not any(isinstance(known, _Dropped) for known in logger.filters):
        logger.addFilter(_Dropped(drops))
