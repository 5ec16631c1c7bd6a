"""What this program costs and what it is worth, measured; `python -m benchmarks` lists the benchmarks."""
