"""``nsq top``: the cluster on a full screen, and changes to it.

view      the lines, columns and order, and the effect of each key on them: pure
screen    the view as lines of text that fill a screen of a given size: pure
app       keys, the screens of textual, and the threads that ask the cluster
messages  nsq tail of a topic and nsq peek of a channel, on the same screen
"""
