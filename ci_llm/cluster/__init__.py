"""The environment of a process: its launcher, SLURM, the walltime, and the processes that it starts itself."""
