"""The jobs that several metrics share: compress a model, tokenize a text, write a task's requests."""
