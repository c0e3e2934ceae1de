"""How the processes of a platform are started and found. `embedded` does it on one machine."""
