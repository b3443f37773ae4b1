"""Scripts that regenerate files of the repository."""
