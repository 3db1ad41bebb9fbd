"""`inferscale serve`: one vLLM server with our connector, for apps that hold no weights."""
