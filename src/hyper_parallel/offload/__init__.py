"""HyperOffload: a step's live bytes under a budget, by moving storages between memories while it runs."""
