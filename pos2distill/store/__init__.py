"""Artifacts, which are published whole or not at all; the sample store; the driver's lease."""
