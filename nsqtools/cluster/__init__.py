"""The daemons of a cluster as one: who has what, how it fares, and what is changed in it."""
