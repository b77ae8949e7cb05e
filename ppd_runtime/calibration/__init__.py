"""Measuring this machine for the planner, and simulating the pipeline on virtual clocks."""
