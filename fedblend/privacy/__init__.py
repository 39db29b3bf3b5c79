"""Privacy: what can be told about clients from what leaves them."""
