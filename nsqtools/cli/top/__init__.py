"""``nsq top``: the cluster on a whole screen, and changes to it.

view      what is shown in which columns and order, and what a key changes in that: pure
screen    the view as lines of text that fill a screen of a given size: pure
app       the keys, the screens of textual, and what asks the cluster on other threads
messages  what the screen is left to: nsq tail of a topic, nsq peek of a channel
"""
