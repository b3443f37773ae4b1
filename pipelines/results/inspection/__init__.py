"""Single questions of a run: the prompt that was asked, what was answered, and what became of the answer."""
