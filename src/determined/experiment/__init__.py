"""Experiments: many trials of one program, chosen by a search and run on the slots of a machine."""
