"""Rewards: verifiers, the sandbox that runs programs, and the pool of processes that calls reward functions."""
