"""Runs of a CSV, as `plan --evaluate` estimates them: cells, configurations as a run's row states them or its framework
has them by default, and estimates.
"""
