"""The frozen base model: its weights, whether they fit into memory, and the modules that carry agents.

Nothing here knows of a crowd.
"""
