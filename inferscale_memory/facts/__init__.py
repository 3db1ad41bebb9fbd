"""What the other rooms know about facts: whose they are, how one reads, when it expires, which belong together."""
