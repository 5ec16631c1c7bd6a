"""Checkpoints that cannot lie: committed and verified, or invisible. Knows names and tensors, nothing of agents."""
