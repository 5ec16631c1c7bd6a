"""The end of a run: killed in the middle of a step, or hanging, or complete; and the result that it leaves."""
