"""The training loop: when to act, and what to do then."""
