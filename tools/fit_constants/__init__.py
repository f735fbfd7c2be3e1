"""Fitting of the planner's constants on published training runs: the runs with their sources (`published_runs`), least
squares and cross-validation by source (`fit`). benchmarks/published.py judges, fits and writes the constants.
"""
