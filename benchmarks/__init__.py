"""Measurements of what this program costs and what it is worth; `python -m benchmarks` lists the benchmarks."""
