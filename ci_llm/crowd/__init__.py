"""The crowd of K agents on one frozen base: its objective in training, and the answers of its agents together."""
