"""The parts of a step: state, members, evaluations, callbacks, numbers that are not finite, lack of memory."""
