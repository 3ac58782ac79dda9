"""Runs on the nodes of a Ray cluster: an agent per node starts them there, placement groups are the slots."""
