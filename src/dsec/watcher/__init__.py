"""The fleet view: what every edge last said of itself. Rebuilt by asking; nothing durable (report, 3)."""
