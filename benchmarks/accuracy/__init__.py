"""`inferscale bench accuracy`: how close injected memories come to the same memories as text."""
