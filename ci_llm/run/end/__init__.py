"""The end of a run: in time, or hanging, or failed; its last save, its mirror, and what it leaves for people."""
