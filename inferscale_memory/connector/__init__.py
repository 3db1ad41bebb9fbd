"""Code that runs inside vLLM. Other rooms use `protocol`, `configuration`, `plugin`, `secret`; benchmarks use more.

connector      vLLM's connector interface; passes each call to the scheduler side or the worker side
protocol       what a request may ask for, what the reply says, owner tokens and salts    (no vLLM)
metadata       what the scheduler side orders and the worker side reports                 (no vLLM)
scheduler      decides what is injected, captured and forgotten
worker         carries out orders: captures, rotates, writes, reports
capture        the hooks that see keys before rotation
compose        one gather, one rotation, and one engine op per layer
pages          writes the paged cache directly, where that was proved equal to the engine's op
check          proves at start-up that attention reads what the connector writes
positions      which layers have positions in their keys
configuration  checks and adjusts vLLM's configuration
plugin         registers the connector with vLLM
redaction      keeps what requests contain out of vLLM's logs
secret         the secret that signs owners
"""
