"""Training and validation data: order, loading, transfer to the device, random numbers."""
