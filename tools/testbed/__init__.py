"""What tests and benchmarks share: runs in forked processes, faults at named moments, toy bases, disks that fail."""
