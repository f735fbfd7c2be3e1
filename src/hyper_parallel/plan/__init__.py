"""The planner: every strategy of a model on a cluster as a row of a table, forecast by closed forms, and the best.

`Table` is what the search and the published runs have in common; `profiles` says what frameworks do by default. No
torch here.
"""
