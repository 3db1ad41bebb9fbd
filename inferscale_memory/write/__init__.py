"""From an `add` to blobs: the turn log, the journal kept in step with mem0's store, and the encodes that follow."""
