"""The controller: drives the groups of workers, scores answers, and decides what starts and what is trained. No torch."""
