"""Communication between processes: the ballot, the gradient all-reduce, and a side channel for checkpoints."""
