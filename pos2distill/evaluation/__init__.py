"""Accuracy by slot with intervals, paired comparison, and the report that shows them."""
