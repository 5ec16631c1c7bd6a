"""The parts of a step: state, rollout, metrics, callbacks, evaluator, requests, what goes wrong."""
