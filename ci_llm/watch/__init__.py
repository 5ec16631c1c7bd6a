"""A run seen from outside, by the files that it writes: for `ci-llm status` and `ci-llm watch`."""
