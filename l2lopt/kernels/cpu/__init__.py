"""The learned optimisers on the CPU: the fused step and its backpropagation through a window."""
