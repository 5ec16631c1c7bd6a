"""The frozen base model: its files, its weights in memory, and the modules that carry agents. It knows no crowd."""
