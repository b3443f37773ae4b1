"""Executors run the operators and the training loop of a stage."""
