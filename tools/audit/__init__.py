"""`python -m tools.audit`: any training script run again and again: does it resume exactly, and what diverges first?"""
