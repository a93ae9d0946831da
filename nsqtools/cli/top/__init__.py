"""``nsq top``: the cluster on a whole screen, and changes to it.

columns   what a line can show in each view: pure
lines     the lines of a view, filtered and sorted: pure
view      which list is shown, and what is selected in it: pure
overlays  what can lie over the list: help, a plan to confirm, messages: pure
console   what every key and click does: pure
screen    all that as text of a given size: pure
keyboard  bytes of a terminal to keys: pure
terminal  takes the terminal, writes lines, gives it back
changes   plans, asked for and applied
messages  a tail or a peek on a thread of its own
loop      draws and reads keys; everything else happens on other threads
"""
