"""Demo: the tool shows itself on daemons of its own, and removes everything afterwards.

story.py   what is shown, step by step, and the clicks that it happens to; spark.py its last part,
           where there is Spark
stage.py   the daemons, the directory and the processes that it happens with
"""
