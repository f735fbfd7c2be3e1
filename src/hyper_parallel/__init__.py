"""HyperParallel: a supernode as one computer."""
