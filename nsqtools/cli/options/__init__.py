"""Options that several commands share, each declared once."""
