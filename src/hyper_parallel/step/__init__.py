"""The training step: recipe, optimizers, capture as a graph, pass pipeline, executors, memory budget."""
