"""Divergences, row weights and the objectives that combine them."""
