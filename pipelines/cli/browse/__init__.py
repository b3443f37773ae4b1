"""Commands for finished results: `inspect`, `runs` and `compare` read them, `export` and `push` copy them elsewhere."""
