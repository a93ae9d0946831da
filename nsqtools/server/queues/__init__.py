"""Where messages wait: topics, channels, what is in flight, memory and files. No sockets."""
