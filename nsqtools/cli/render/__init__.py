"""From results to text: tables, JSON, progress."""
