"""Attacks that rebuild a client's images from its update, and measures of the rebuilt images."""
