"""Roles in their workers: the actor trains, rollouts generate, a reference and a critic score."""
