"""DRAW, a recurrent variational autoencoder that paints images."""
