"""The command line: each command is a function, and every error becomes one explanation and an exit code."""
