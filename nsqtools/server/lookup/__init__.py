"""nsqlookupd from both ends: how nsqd registers, and what nsqlookupd knows."""
