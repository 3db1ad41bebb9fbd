"""`inferscale verify`: shows on a model of the user's, with its serving engine, that injection is exact.

`command` reads arguments and prints, `checks` says what is asked of the engine and what must come of it,
`material` is what they talk about, `reference` computes what moved facts should have given. The engine is
used through the `Engine` protocol alone.
"""

from inferscale_memory.verify.command import main

__all__ = ["main"]
