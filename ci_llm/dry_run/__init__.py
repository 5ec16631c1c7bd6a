"""The named checks of `ci-llm check`, and what a configuration will cost."""
