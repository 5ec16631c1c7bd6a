"""Small training scripts that resume exactly, and can be told to make one mistake each; `ci-llm audit` must name it."""
