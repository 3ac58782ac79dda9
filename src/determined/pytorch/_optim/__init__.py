"""Steps of optimizers and LR schedulers: gradients, precision, fused kernels."""
