"""The proxy of the sandboxes: the one way out, decided by name.

It runs as a process of its own without privilege (`python -m dsec.edge.proxy`), since it reads what sandboxes and servers
send. Deciding is in `rules` and `names`, reading in `http1` and `hello`, acting in `session` and `tunnel`.
"""
