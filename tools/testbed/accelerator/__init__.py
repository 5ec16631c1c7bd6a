"""A CUDA device on a machine without one, by which the paths of a GPU run in tests; see `device.cpp` for its limits.

`library` builds it, `face` puts torch.cuda on it, `trace` notes launches, waits and copies, and
`python -m tools.testbed.accelerator` runs a command of ours on it. It is for processes of their own: PyTorch asks for
its device once, when it is imported.
"""
