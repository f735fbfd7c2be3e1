"""Generation within a byte budget: what the device must hold, divided into weights, pages, buffers and workspace."""
