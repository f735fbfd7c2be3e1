"""Plans of generation: axes, batch and tier split for a model, a workload and a cluster, by the closed form of passes.

`search.solve` finds them, `answer` shows them. The closed form is `simulator.generation`, which simulate --generate
shares.
"""
