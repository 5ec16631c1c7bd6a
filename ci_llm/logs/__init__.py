"""What a run tells people, programs and trackers."""
