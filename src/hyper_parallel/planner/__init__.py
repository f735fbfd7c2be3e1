"""The planner: searches all strategies of a model on a cluster with closed-form estimates.

`Table` is what the search and the published runs have in common; `profiles` says what frameworks do by default. No
torch here.
"""
