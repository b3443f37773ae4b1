"""Run a command as a job on a running Ray cluster."""
