"""Settings that all tests share."""

import hypothesis

# A loaded or slow machine is no fault of the code: no example is judged by its time.
hypothesis.settings.register_profile(
    "draftmill", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("draftmill")
