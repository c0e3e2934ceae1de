"""The demo: a burst of real coding rollouts on real bug-fix tasks, graded in fresh sandboxes.

Read in this order: `tasks` (what a task is), `fetch` and `trees` (its files), `prepare` (its layers), `scripts` (the recorded
tool calls that stand in for a model), `rollout` (one rollout and its verdict), `naive` (what a trusting grader believes), `burst`
(many rollouts at once), `trainer` and `chaos` (the same with kills in the middle), `report` (the HTML page). It uses the public
SDK and the layer builder only.
"""
