"""The parts of a step: state, rollout, gradients, metrics, callbacks, requests, what goes wrong."""
