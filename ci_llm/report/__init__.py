"""The report of a run, and the comparison of several: both read the files that runs leave, and load no torch."""
