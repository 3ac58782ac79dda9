"""What a run shows: the display in the terminal and profiles."""
