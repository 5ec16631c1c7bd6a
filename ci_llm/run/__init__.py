"""A run from the first line to the last: built, resumed, trained, judged, concluded."""
