"""Weight synchronization: the actor's parameters, in its layouts, to the rollout's in theirs, point to point."""
