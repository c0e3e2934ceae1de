"""Which edge a new sandbox goes to: filter, sample a few, take the least loaded (report, 3)."""
