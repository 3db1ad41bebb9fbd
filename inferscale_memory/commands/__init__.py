"""The subcommands of `inferscale`."""
