"""The agents as a service: OpenAI's API in front of one crowd, whose open texts all go one token further in a step.

The event loop reads requests and writes answers; one thread owns the crowd. `app.py` joins them.
"""
