"""Data sets as people have them, made into rows, token ids and micro-batches in a computed order."""
