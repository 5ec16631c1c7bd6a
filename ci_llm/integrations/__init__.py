"""The package inside other libraries: checkpoints under Accelerate, Trainer and Lightning, crowds in lm_eval."""
