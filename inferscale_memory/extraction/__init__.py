"""Drawing facts out of messages with the memory's own engine, as mem0 asks a language model to."""
