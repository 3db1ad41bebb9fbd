"""Our code inside vLLM. `protocol` is what the outside may import; everything else runs in the engine.

protocol     what a request may ask, what it is told, tokens and salts       (no vLLM)
metadata     what the scheduler side sends the worker side and hears back    (no vLLM)
scheduler    decides: verifies, matches, allocates rows, answers
residency    remembers which prefix-cached blocks hold which facts
worker       obeys: catches, rotates, writes, reports
capture      the hooks that see keys before rotation
compose      one gather, one rotation, one engine op per layer
check        proves at start-up that what is written is what attention reads
connector    vLLM's interface, handing each call to its side
"""
