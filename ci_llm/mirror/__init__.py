"""A run's folder once more in an object store: sent behind the training, committed, verified, fenced, and read back."""
