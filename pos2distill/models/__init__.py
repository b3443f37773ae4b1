"""Models and tokenizers: load and save, batches of prompt and response, hidden states, the output head."""
