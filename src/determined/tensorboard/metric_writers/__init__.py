"""Writers of the trial's own TensorBoard metrics, one module a framework."""
