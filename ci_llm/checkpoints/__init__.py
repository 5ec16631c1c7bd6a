"""The checkpoints of a run: committed and verified, or not there. Knows names and tensors, nothing of agents."""
