"""Losses of reinforcement learning and of preference training: advantages, policy, value and preference objectives.

Functions of tensors: no model and no configuration of the rest of the library. Sums are divided by a count of the whole
step, so that the parts of micro-batches and ranks add up to the loss of the step.
"""
