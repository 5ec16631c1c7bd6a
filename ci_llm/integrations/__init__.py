"""Checkpoints of this package under other trainers: Accelerate, Transformers' Trainer, Lightning."""
