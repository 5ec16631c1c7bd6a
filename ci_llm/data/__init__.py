"""Data people have, as rows in a computed order, packed into micro-batches."""
