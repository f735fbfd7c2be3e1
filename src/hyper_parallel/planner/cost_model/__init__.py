"""The cost model: closed forms over a table's columns; `step.estimate` combines them."""
