"""Changes to rotary position embeddings (RoPE) that need no training: one file for each method."""
