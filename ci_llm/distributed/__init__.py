"""The communication between processes: the ballot, the gradient all-reduce, a side channel for checkpoints."""
