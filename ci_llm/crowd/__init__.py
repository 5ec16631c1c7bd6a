"""The crowd of K agents on one frozen base: its module, objective, answers, scores and files."""
