"""The tables and figures of the pages, made from the committed results."""
