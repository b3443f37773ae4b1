"""Pos2Distill: distil a language model's best document slot into all the others.

The layers, from the bottom up (imports point down): config, records, errors, randomness; tasks; models; losses;
store; sampling, training and evaluation. Nothing here imports Ray: the pipelines do.
"""

__version__ = "0.1.0"
