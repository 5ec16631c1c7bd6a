"""The environment of a process: its launcher, SLURM, the walltime, the Hugging Face hub."""
