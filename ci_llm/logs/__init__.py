"""The logs of a run: for people, for programs and for trackers."""
