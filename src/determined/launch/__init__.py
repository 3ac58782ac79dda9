"""Start the processes of one training; see `python -m determined.launch.torch_distributed --help`."""
