"""Who may do what. One machine has one key and one project; both are checked on every request."""
