"""The parts that methods are composed of, one folder or file for each kind."""
