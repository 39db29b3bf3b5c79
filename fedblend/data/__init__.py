"""Data: what a data set is, how it is loaded, scaled, and split over clients."""
