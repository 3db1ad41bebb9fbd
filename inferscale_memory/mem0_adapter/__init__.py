"""mem0's conventions: its rows, its stores, its embedder, its old options."""
