"""``nsq top``: the cluster on a whole screen.

columns   what a line shows on each level: pure
view      what is shown and what a key changes: pure
screen    the view as text of a given size
keyboard  bytes of a terminal to keys, and the terminal's mode
loop      looks at the cluster on one thread, draws and reads keys on the other
"""
