"""The command line: its options, its help, and which function each command calls."""
