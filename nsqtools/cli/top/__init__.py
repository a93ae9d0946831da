"""``nsq top``: the cluster on a whole screen, and changes to it.

columns   what a line can show in each view: pure
view      which lines are shown, in which order, and what a key changes in that: pure
screen    the view as lines of text that fill a screen of a given size: pure
sources   what asks the cluster on another thread: changes and their plans, messages
app       the keys, and the screens of textual
"""
