"""`inferscale demo`: a conversation is remembered, then asked about along four paths, and timed."""
