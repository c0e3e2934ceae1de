"""The only network path between trusted callers and sandboxes. Keeps no state of any sandbox (report, 3)."""
