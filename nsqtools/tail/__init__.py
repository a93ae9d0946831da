"""Follow topics: the messages as they come, a look at a channel, and limits that end a run."""
