"""The data sources that Spark writes to."""
