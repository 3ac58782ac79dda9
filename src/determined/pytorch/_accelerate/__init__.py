"""Options that make an unmodified program faster: precision, `torch.compile`, CUDA graphs."""
