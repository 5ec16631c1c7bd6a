"""The frozen base model: its files, its weights in memory, and the modules that carry agents.

Nothing here knows of a crowd.
"""
