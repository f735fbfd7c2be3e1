"""What each role does in its workers: the actor trains, rollouts generate, a reference and a critic score."""
