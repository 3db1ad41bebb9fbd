"""The parts of the transformers engine."""
