"""Everything that goes when a memory goes: blobs, turns, history, links, and what is left of its bytes."""
