"""Changes to rotary position embeddings (RoPE) that need no training: one file for each method.

Imports nothing, so that a search is planned (`curves`, `search`) without torch.
"""
