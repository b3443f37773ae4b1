"""The stages on Ray, the only importer of it, and the recipes."""
