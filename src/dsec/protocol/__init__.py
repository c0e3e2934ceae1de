"""What crosses a process boundary: ids, specs, events, error kinds, and the link that carries them."""
