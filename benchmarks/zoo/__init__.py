"""Small training scripts that resume exactly, and can be told to make one mistake each; `tools.audit` must name it."""
