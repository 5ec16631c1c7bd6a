"""The dry run: proves on this machine, with this configuration, that a run will find what it needs."""
