"""The reference of every field, read from the code: for ``fedblend list NAME``, and as ``docs/configuration.md``.

``python -m fedblend.experiment.reference > docs/configuration.md`` writes the page anew.
"""

from fedblend.experiment.reference.options import TABLE_CLASSES, Entry, Option, of_kind, of_part, of_table, tables

__all__ = ["TABLE_CLASSES", "Entry", "Option", "of_kind", "of_part", "of_table", "tables"]
