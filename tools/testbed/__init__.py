"""The testbed of tests and benchmarks: forked runs, faults at named moments, toy bases, disks that fail."""
