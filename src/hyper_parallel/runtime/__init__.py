"""Runs Programs: the generators of their tasks, transfers between groups and buffers."""
