"""The performance model: closed forms over a table's columns. `step.forecast` puts them together."""
