"""Blobs and where they are kept. Imports no engine, no vLLM and nothing of a memory; only `arena` imports torch."""
