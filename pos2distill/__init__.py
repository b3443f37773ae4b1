"""Pos2Distill: distil a language model's best document slot into all the others.

The floors, from the ground up (imports point down): config, records, errors, randomness; tasks; models and losses;
store; sampling, training and evaluation. Nothing here imports Ray: the pipelines do.
"""
