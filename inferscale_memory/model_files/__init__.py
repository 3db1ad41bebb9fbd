"""What is read of a model's folder without loading the model: where it is, its size, and the name of its contents."""
