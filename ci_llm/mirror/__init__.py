"""The mirror of a run in an object store: sent behind the training, committed, verified, fenced, and read back."""
