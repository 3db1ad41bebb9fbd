"""`inferscale verify`: shows on a user's own model, with the engine that will serve it, that injection is exact.

`command` reads arguments and prints, `checks` says what is asked of the engine and what its answers must show,
`reference` computes what they should have been. The engine is used through the `Engine` protocol alone.
"""

from inferscale_memory.verify.command import main

__all__ = ["main"]
