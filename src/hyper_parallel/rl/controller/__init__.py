"""The controller: drives groups of workers, scores answers, decides what starts and what is trained. No torch."""
