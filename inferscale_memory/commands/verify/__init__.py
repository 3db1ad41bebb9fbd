"""`inferscale verify`: shows on a model of the user's, with its serving engine, that injection is exact.

`command` reads arguments and prints; `evidence` asks the engine, through the `Engine` protocol alone, about
the sentences of `material`; `judge` says what the answers must show, where need be by `reference`, which
computes what moved facts should have given, without any of our code.
"""

from inferscale_memory.commands.verify.command import main

__all__ = ["main"]
