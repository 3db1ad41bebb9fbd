"""A conversation in the terminal: `inferscale chat`."""
