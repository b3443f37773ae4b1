"""Accuracy by slot with intervals, paired comparison of two models, and the report."""
