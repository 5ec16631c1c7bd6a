"""Sweeps: the agents of a pass are trials of different settings, and successive halving decides which continue."""
