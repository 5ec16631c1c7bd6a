"""A run from its first line to its last: set up, resumed, trained, saved, evaluated, concluded."""
