"""The simulation of a job: the policies of this project, driven through years of failures in seconds."""
