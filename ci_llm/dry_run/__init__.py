"""The dry run of a configuration (`ci-llm check`): its named checks, which also tell what the run will cost."""
