"""What the ``nsq spark`` commands do, given a session; usable from Python."""
