"""The parts of a step: state, rollout, gradients, metrics, callbacks, evaluator, rounds, requests, what goes wrong."""
