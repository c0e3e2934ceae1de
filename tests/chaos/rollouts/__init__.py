"""Kill -9 of trainer, apiserver, edge and launcher at each durable step of rollouts that are recorded, replayed and graded:
`make chaos-rollouts`."""
