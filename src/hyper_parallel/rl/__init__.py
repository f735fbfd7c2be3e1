"""Reinforcement learning: a controller drives an actor, rollouts, a reference, a critic and rewards."""
