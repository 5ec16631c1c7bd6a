"""The audit of any training script, which is run again and again: does it resume exactly, and what diverges first?"""
