"""Print the page: ``python -m fedblend.reference > docs/configuration.md``."""

from fedblend.reference.page import page

print(page(), end="")
