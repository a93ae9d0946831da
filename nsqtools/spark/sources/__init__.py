"""The data sources that Spark reads from."""
