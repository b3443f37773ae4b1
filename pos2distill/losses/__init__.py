"""Divergences, position weights and the objectives made of them."""
