"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long a machine takes, busy or not, says nothing of what is asserted.
settings.register_profile("fedblend", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fedblend")
