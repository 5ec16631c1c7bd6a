"""Scenarios on a real SLURM cluster."""
