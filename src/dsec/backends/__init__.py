"""Where containers come from: the launcher, layer mounts, and probes of what this machine can do."""
