"""The daemons of a cluster as one: which there are, what they hold, and changes to them."""
