"""Print the page: ``python -m fedblend.experiment.reference > docs/configuration.md``."""

from fedblend.experiment.reference.page import page

print(page(), end="")
