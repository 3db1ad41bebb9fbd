"""`inferscale migrate`: the facts of any mem0 memory into one of ours, without a model being asked anything."""
