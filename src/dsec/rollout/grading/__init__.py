"""Grading: what an agent changed, judged by tests that it never saw, in a sandbox that it never was in (report, 6)."""
