"""Reports: what went through topics, by the hour.

statistics  the figures, aggregated by Spark
gaps        pauses in a topic
report      both together, as plain values and as a document
page        the document as one HTML page, with page.html
"""
