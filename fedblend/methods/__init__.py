"""The parts that methods are composed of, one package or module for each kind."""
