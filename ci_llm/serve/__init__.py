"""The agents as a service: OpenAI's API for one crowd, which writes all open texts together, one token per step.

The event loop reads requests and sends answers, and one thread owns the crowd. `app.py` joins them.
"""
