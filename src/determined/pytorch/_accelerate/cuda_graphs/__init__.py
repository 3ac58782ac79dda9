"""Training steps replayed as CUDA graphs."""
