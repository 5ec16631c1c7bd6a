"""Exact checkpoints for the loops of other libraries: Accelerate, Trainer, Lightning."""
