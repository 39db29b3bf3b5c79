"""The distributed engine: a cohort's clients spread over processes, on one machine or on several."""
