"""Options that make a program faster: `torch.compile`, CUDA graphs."""
