"""InferScale Memory: a remembered fact is prefilled once and injected ever after."""
