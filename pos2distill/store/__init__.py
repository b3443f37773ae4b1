"""Artifacts, published whole or not at all; the sample store; the layout of a checkpoint; the driver's lease."""
