"""The parts of a step: state, rollout, metrics, callbacks, requests, and what goes wrong."""
