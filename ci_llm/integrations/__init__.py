"""The package inside other libraries: checkpoints under Accelerate, Trainer and Lightning."""
