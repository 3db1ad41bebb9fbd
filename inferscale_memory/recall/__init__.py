"""One turn, from the question to the reply: which memories are recalled, the prompt they stand in, and the answer."""
