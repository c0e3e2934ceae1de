"""Kill -9 of any process at any durable step of any operation, seeded: `make chaos`."""
