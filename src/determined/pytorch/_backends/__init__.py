"""How models run on one process or several: single, DDP, FSDP."""
