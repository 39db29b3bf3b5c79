"""Objectives: the loss that a client minimises on a batch, and terms that are added to it."""
