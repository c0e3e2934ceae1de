"""The demo: a burst of real coding rollouts on real bug-fix tasks, graded in fresh sandboxes.

Read in this order: `tasks` (what a task is), `fetch` and `trees` (its files), `prepare` (its layers), `scripts` (the recorded
tool calls that stand in for a model), `rollout` (one rollout), `changes` and `verdict` (what is graded and how), `burst` (many
rollouts at once), `report` (the HTML page). It uses the public SDK and the layer builder only.
"""
