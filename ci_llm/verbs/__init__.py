"""The verbs around a run: what `ci-llm` does beside training."""
