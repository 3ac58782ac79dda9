"""The runner: drives one experiment."""
