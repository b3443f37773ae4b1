"""Specs to start from, and what becomes of them."""
