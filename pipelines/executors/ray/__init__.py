"""The `ray` executor: Ray Data actor pools and Ray Train workers."""
