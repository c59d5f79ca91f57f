"""Files: tensors, checkpoints and the log of a run, each written whole or not at all."""
