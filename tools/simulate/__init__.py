"""`python -m tools.simulate`: the policies of this project, driven through years of failures in seconds."""
